"""Waiting for what children of the test's own process do."""

from collections.abc import Callable

from serin.serving.children import Children as ChildHost
from serin.serving.envoy.gateway import PROCESS_NAME
from tests.kit.waiting import until
from tests.kit.web import answers

__all__ = ["ChildHost", "wait_for"]


def wait_for(
    what: str, happened: Callable[[], object], host: ChildHost, *names: str, within_s: float = 120.0
) -> None:
    """Returns when it happened; fails at once when a child it depends on is gone: the gateway, or these."""
    needed = names or (PROCESS_NAME,)
    until(
        happened, what, within_s=within_s, alive=lambda: all(host.state(each) == "running" for each in needed)
    )


def is_ready(url: str) -> bool:
    """Whether the Triton at host:port answers that it is ready."""
    return answers(url, "/v2/health/ready")
