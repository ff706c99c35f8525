"""The S3 server (moto) that the tests of the store use."""

from tests.unit.store.conftest import bucket, server

__all__ = ["bucket", "server"]
