"""Waiting for what children of the test's own process do."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable

from serin.serving.children import Children as ChildHost

__all__ = ["ChildHost", "wait_for"]


def wait_for(
    what: str, happened: Callable[[], bool], host: ChildHost, *names: str, within_s: float = 120.0
) -> None:
    """Returns when it happened; fails at once when one of the children it depends on is gone."""
    end = time.monotonic() + within_s
    while not happened():
        for name in names:
            assert host.state(name) == "running", f"{name} ended while the test waited for {what}"
        assert time.monotonic() < end, f"{what} did not happen within {within_s:g} s"
        time.sleep(0.02)


def is_ready(url: str) -> bool:
    """Whether the Triton at host:port answers that it is ready."""
    connection = http.client.HTTPConnection(url, timeout=5)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
