"""An S3 server (moto) for a session of tests, and the variables that lead to it."""

import os
import secrets
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.threads import beside


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    answer, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answered(request: dict[str, Any], start: Any) -> Any:
        if not request.keys() & {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"}:
            return answer(request, start)
        with one_at_a_time:  # moto looks at the condition and writes in two steps; S3 does both in one
            return answer(request, start)

    running = make_server("127.0.0.1", 0, answered, threaded=True, request_handler=MotoRequestHandler)
    with beside(running.serve_forever):
        yield f"http://127.0.0.1:{running.port}"
        running.shutdown()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment leads to the server and to nobody's account."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", s3_server),
        ("AWS_CONFIG_FILE", os.devnull),
        ("AWS_SHARED_CREDENTIALS_FILE", os.devnull),
    ):
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def bucket(s3: str) -> str:
    """The URL of a store in an empty bucket."""
    name = f"bucket-{secrets.token_hex(8)}"
    urllib.request.urlopen(urllib.request.Request(f"{s3}/{name}", method="PUT"))
    return f"s3://{name}/some/where"
