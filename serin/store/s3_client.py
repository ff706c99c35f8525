"""Clients of S3, one per process and set of credentials, and what their errors mean.

botocore reads endpoint and credentials as every AWS tool does, refreshes those that can be refreshed, retries with
backoff and compares checksums. Credentials that it cannot refresh (variables, a file that another program rewrites) are
read again when the store says that they have expired.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Final

import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    IncompleteReadError,
    NoCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)  # fmt: skip
from urllib3.exceptions import HTTPError as UrlLibError

from serin.errors import StoreError, StoreNotWritable, StoreUnreachable
from serin.machine import environment

MISSING: Final = {"NoSuchKey", "404", "NotFound"}
LOST: Final = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
EXPIRED: Final = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
BROKEN: Final = (  # a response that broke off or stalled in its body; botocore lets some of them through as they are
    ResponseStreamingError, ReadTimeoutError, IncompleteReadError, UrlLibError, ConnectionError, TimeoutError,
)  # fmt: skip
_FORBIDDEN: Final = {"AccessDenied", "403", "Forbidden", "AllAccessDisabled"}
_FULL: Final = {"QuotaExceeded", "InsufficientStorage", "507", "XMinioStorageFull"}
_CONNECTIONS: Final = 20
_clients: dict[object, S3Client] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long one request may be silent, and how often it is tried. `patience_s`: a call that met a broken response is
    not tried again after so long."""

    connect_s: float
    read_s: float
    attempts: int
    patience_s: float


QUICK = Timing(
    connect_s=2.0, read_s=5.0, attempts=3, patience_s=3.0
)  # a controller must notice in seconds that it is cut off
PATIENT = Timing(
    connect_s=5.0, read_s=20.0, attempts=6, patience_s=120.0
)  # files: a busy store answers later


class S3Client:
    """botocore's client for S3, `s3`, which is made again with other credentials when those it has have expired."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._lock = threading.Lock()
        self.s3: Any = None
        self._token: tuple[str, ...] | None = None
        self._make()

    def renew(self, used: Any) -> bool:
        """Replaces the client `used`; returns whether there are other credentials than it had."""
        with self._lock:
            return self.s3 is not used or self._make()

    def _make(self) -> bool:
        session = botocore.session.get_session()
        found = session.get_credentials()
        frozen = None if found is None else found.get_frozen_credentials()
        token = () if frozen is None else (str(frozen.access_key), str(frozen.token))
        renewed = token != self._token
        config = Config(
            connect_timeout=self._timing.connect_s,
            read_timeout=self._timing.read_s,
            retries={"total_max_attempts": self._timing.attempts, "mode": "standard"},
            max_pool_connections=_CONNECTIONS,
        )
        self.s3, self._token = session.create_client("s3", config=config), token
        return renewed


def s3_client(timing: Timing) -> S3Client:
    """The client of this process for the current environment: making one takes a tenth of a second."""
    key = (timing, os.getpid(), environment.aws_settings())  # a client does not survive a fork
    with _lock:
        if key not in _clients:
            _clients[key] = S3Client(timing)
        return _clients[key]


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def expired(error: Exception) -> bool:
    return isinstance(error, ClientError) and error_code(error) in EXPIRED


def store_error(url: str, error: Exception, *, writing: bool = False) -> StoreError:
    """The error of the store that a foreign one stands for."""
    if isinstance(error, ClientError):
        code = error_code(error)
        if code in EXPIRED:
            reason = (
                f"its credentials have expired ({code}); renew them, or use ones that botocore refreshes (a role, "
                "web identity, SSO or credential_process)"
            )
            return StoreUnreachable(url=url, reason=reason)
        if writing and code in _FORBIDDEN | _FULL:
            return StoreNotWritable(path=url, reason=str(error))
    if isinstance(error, CredentialRetrievalError):
        return StoreUnreachable(url=url, reason=f"its credentials cannot be refreshed: {error}")
    if isinstance(error, NoCredentialsError):
        return StoreUnreachable(
            url=url, reason="no credentials were found (AWS_ACCESS_KEY_ID, a profile, a role)"
        )
    return StoreUnreachable(url=url, reason=str(error) or type(error).__name__)
