"""An S3 server for the tests of the store (moto), with an empty bucket for each test."""

import os
import secrets
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from serin.store.s3_objects import S3Objects


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store in an empty bucket."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", server),
        ("AWS_CONFIG_FILE", os.devnull),
        ("AWS_SHARED_CREDENTIALS_FILE", os.devnull),
    ):
        monkeypatch.setenv(name, value)
    url = f"s3://bucket-{secrets.token_hex(8)}/some/where"
    objects = S3Objects(url)
    objects._client.s3.create_bucket(Bucket=objects._bucket)
    return url
