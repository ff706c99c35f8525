"""Files of a store on S3: many at a time, each tried again after throttling or a broken or stalled transfer.

boto3's own transfer manager (s3transfer) cuts large files into parts and resumes a broken download.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from s3transfer.exceptions import RetriesExceededError
from s3transfer.futures import TransferFuture
from s3transfer.manager import TransferConfig, TransferManager

from serin.errors import ObjectExists
from serin.store.objects import checked_key
from serin.store.s3_client import BROKEN, LOST, MISSING, PATIENT, error_code, expired
from serin.store.s3_objects import S3Objects

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 8
_ROUNDS, _LONGEST_PAUSE_S = 6, 20.0
_PASSES: Final = {
    "SlowDown", "503", "ServiceUnavailable", "InternalError", "500", "502", "504", "RequestTimeout", "Throttling",
    "ThrottlingException", "RequestLimitExceeded", "BadDigest", "IncompleteBody", "RequestTimeTooSkewed",
}  # fmt: skip
_FOREIGN: Final = (ClientError, BotoCoreError, RetriesExceededError, OSError, *BROKEN)


class S3Files(S3Objects):
    """Objects with more patience, and files."""

    def __init__(self, url: str) -> None:
        super().__init__(url, timing=PATIENT, publishes=True)

    def create_file(self, key: str, path: Path) -> None:
        """Writes the file under a key that does not exist yet, in one request; else raises ObjectExists.

        Also when an earlier attempt of the same call has written it.
        """
        name = self._prefix + checked_key(key)

        def put(s3: Any) -> None:
            with path.open("rb") as body:
                s3.put_object(Bucket=self._bucket, Key=name, Body=body, IfNoneMatch="*")

        try:
            self._patiently(put)
        except (ClientError, BotoCoreError) as error:
            if isinstance(error, ClientError) and error_code(error) in LOST:
                raise ObjectExists(key=key, url=self.url) from error
            raise self._error(error, writing=True) from error

    def upload(self, files: Mapping[str, Path]) -> None:
        """Writes the files (by key). One that was written is not sent again when others fail."""

        def send(manager: TransferManager, key: str) -> TransferFuture:
            return manager.upload(str(files[key]), self._bucket, self._prefix + checked_key(key))

        self._transfer(list(files), send, writing=True)

    def download(self, files: Mapping[str, Path]) -> None:
        """Fetches the objects (by key) into files, each whole or not at all. FileNotFoundError: one is not there."""

        def fetch(manager: TransferManager, key: str) -> TransferFuture:
            return manager.download(self._bucket, self._prefix + checked_key(key), str(files[key]))

        self._transfer(list(files), fetch, writing=False)

    def abandon_uploads(self, older_than_s: float, prefix: str = "") -> int:
        """Ends uploads in parts that were begun so long ago and never completed, of keys that begin with `prefix`;
        returns how many."""
        ended = 0
        pages = self._client.s3.get_paginator("list_multipart_uploads")
        try:
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                for found in page.get("Uploads", ()):
                    if time.time() - found["Initiated"].timestamp() > older_than_s:
                        self._client.s3.abort_multipart_upload(
                            Bucket=self._bucket, Key=found["Key"], UploadId=found["UploadId"]
                        )
                        ended += 1
        except (ClientError, BotoCoreError) as error:
            raise self._error(error, writing=True) from error
        return ended

    def _transfer(
        self, keys: Sequence[str], begin: Callable[[TransferManager, str], TransferFuture], *, writing: bool
    ) -> None:
        """Rounds over what is still missing; a round without any success brings the end nearer."""
        left, failures = keys, 0
        while left:
            used = self._client.s3
            with _manager(used) as manager:
                outcomes = {key: _outcome(future) for key, future in [(k, begin(manager, k)) for k in left]}
            failed = {key: error for key, error in outcomes.items() if error is not None}
            if not failed:
                return
            key, error = next(
                ((k, e) for k, e in failed.items() if not _passes(e)), next(iter(failed.items()))
            )
            if _missing(error) and not writing:
                raise FileNotFoundError(key) from error
            if expired(error):
                if not self._client.renew(used):
                    raise self._error(error, writing=writing) from error
            elif isinstance(error, OSError) and not _of_connection(error):
                raise error
            elif not _passes(error):
                raise self._error(error, writing=writing) from error
            failures = failures + 1 if len(failed) == len(left) else 1
            if failures >= _ROUNDS:
                raise self._error(error, writing=writing) from error
            logger.warning(f"{len(failed)} of {len(left)} files of {self.url} are tried again: {error}")
            time.sleep(random.uniform(0.5, 1.0) * min(_LONGEST_PAUSE_S, 2.0 ** (failures - 1)))
            left = list(failed)


@contextmanager
def _manager(client: Any) -> Iterator[TransferManager]:
    with TransferManager(client, TransferConfig(max_request_concurrency=_AT_ONCE)) as manager:
        yield manager


def _outcome(future: TransferFuture) -> Exception | None:
    try:
        future.result()
    except _FOREIGN as error:
        if isinstance(error, RetriesExceededError) and isinstance(error.last_exception, Exception):
            return error.last_exception
        return error
    return None


def _missing(error: Exception) -> bool:
    return isinstance(error, ClientError) and error_code(error) in MISSING


def _of_connection(error: OSError) -> bool:
    """Or else of this machine's disk."""
    return isinstance(error, BROKEN) or error.errno is None


def _passes(error: Exception) -> bool:
    """Whether the same may succeed a little later."""
    if isinstance(error, ClientError):
        return error_code(error) in _PASSES
    if isinstance(error, OSError) and not isinstance(error, BROKEN):
        return _of_connection(error)
    return not isinstance(error, NoCredentialsError)
