"""An S3 server (moto) for a session of tests, and the variables that lead to it."""

import os
import secrets
import urllib.request
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


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
