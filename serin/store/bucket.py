"""Objects and files of a bucket on S3, Google Cloud Storage or Azure, through obstore.

obstore signs requests, tries them again with backoff, continues a response that broke off, and cuts large files into
parts. Here is what its errors mean, what it does not try again (a conditional write whose answer was lost), credentials
that expire, and the transfer of many files.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError, UnauthenticatedError
from obstore.store import from_url

from serin.errors import ObjectChanged, ObjectExists, StoreError, StoreNotWritable, StoreUnreachable
from serin.machine import environment
from serin.machine.durable import replacing
from serin.store.objects import Entry, Stored, checked_key

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Item = TypeVar("Item")

_PART_BYTES: Final = 8 << 20
_MOST_PARTS: Final = 9000  # S3 takes 10,000 of a file
_AT_ONCE: Final = 8  # files, or parts of them
_STEP_BYTES, _STEP_S = 16 << 20, 16.0  # the time to send counts as silence: 1 MB/s is fast enough
_REQUEST_S: Final = 600.0  # a part over a slow link, however steadily it arrives
_CREDENTIALS_S: Final = 300.0  # until they are asked for again
_REWRITTEN_S: Final = (0.1, 0.3, 0.6)  # between looks at a file that a program may be rewriting
_EXPIRED: Final = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_FORBIDDEN: Final = {
    "AccessDenied", "AllAccessDisabled", "AuthorizationFailure", "AuthorizationPermissionMismatch", "Forbidden",
}  # fmt: skip
_FULL: Final = {"507", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_PASSES: Final = {"408", "429", "BadDigest", "IncompleteBody", "RequestTimeout", "TooManyRequests"}
_NO_BUCKET: Final = {"ContainerNotFound", "NoSuchBucket"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long one request may be silent, and how often it is tried. `patience_s`: a call whose answer was lost is not
    made again after so long."""

    connect_s: float
    read_s: float
    attempts: int
    patience_s: float


# A controller must notice in seconds that it is cut off. For files: a busy store answers later.
QUICK = Timing(connect_s=2.0, read_s=5.0, attempts=3, patience_s=3.0)
PATIENT = Timing(connect_s=5.0, read_s=20.0, attempts=6, patience_s=120.0)


def bucket_client(url: str, timing: Timing) -> Any:
    """Returns obstore's client of this process for the current environment."""
    return _client(url, timing, environment.bucket_settings(), os.getpid())


@lru_cache(maxsize=16)
def _client(url: str, timing: Timing, variables: object, process: int) -> Any:  # noqa: ARG001
    if _first_process() != process:  # its threads are not here: a call would wait for them forever
        raise StoreUnreachable(
            url=url, reason="this process was forked from one that used it; start a new process instead"
        )
    authority = environment.path("AWS_CA_BUNDLE") if url.startswith("s3") else None
    try:
        return from_url(
            url,
            client_options={
                **({} if authority is None else {"root_certificate": authority.read_bytes()}),
                "allow_http": True,
                "connect_timeout": dt.timedelta(seconds=timing.connect_s),
                "read_timeout": dt.timedelta(seconds=timing.read_s),
                "timeout": dt.timedelta(seconds=_REQUEST_S),
            },
            retry_config={
                "max_retries": timing.attempts - 1,
                "retry_timeout": dt.timedelta(seconds=timing.attempts * timing.read_s),
            },
            **(_aws_options() if url.startswith("s3") else {}),
        )
    except (BaseError, OSError, ValueError) as error:
        raise StoreUnreachable(url=url, reason=reason_of(error)) from error


@lru_cache(maxsize=1)
def _first_process() -> int:
    return os.getpid()


def _aws_options() -> dict[str, Any]:
    """Region, endpoint and credentials as every AWS tool finds them. obstore reads variables, and no files of AWS."""
    if environment.aws_variables_suffice():
        return {}
    import botocore.session  # takes half a second
    from botocore.configprovider import ConfiguredEndpointProvider

    session = botocore.session.get_session()
    configured = ConfiguredEndpointProvider(
        full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name="s3"
    )
    found = {"region": session.get_config_variable("region"), "endpoint": configured.provide()}
    credentials: Any = None

    def provide() -> dict[str, Any]:
        nonlocal credentials
        credentials = credentials or _aws_credentials()
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": dt.datetime.now(dt.UTC) + dt.timedelta(seconds=_CREDENTIALS_S),
        }

    return {"credential_provider": provide, **{name: value for name, value in found.items() if value}}


def _aws_credentials() -> Any:
    """Looks for credentials where every AWS tool does. A program that renews them may be rewriting their file: one that
    is empty or half is read again."""
    from botocore.exceptions import ConfigParseError, PartialCredentialsError
    from botocore.session import get_session

    for pause_s in _REWRITTEN_S:
        session = get_session()
        with suppress(ConfigParseError, PartialCredentialsError):
            if credentials := session.get_credentials():
                return credentials
        if not Path(session.get_config_variable("credentials_file")).expanduser().exists():
            break
        time.sleep(pause_s)
    raise ValueError("no credentials were found (AWS_ACCESS_KEY_ID, a profile, a role)")


def reason_of(error: Exception) -> str:
    """Returns what went wrong, without obstore's description of its own state."""
    text = str(error).partition("\n\nDebug source")[0]
    if provider := re.search(r"credential provider: (\w+): (.*)", text):
        own = provider[1] == "ValueError"
        return provider[2] if own else f"its credentials cannot be refreshed: {provider[2]}"
    if code := re.search(r"<Code>(\w+)</Code>\s*(?:<Message>(.*?)</Message>)?", text, re.DOTALL):
        request = re.search(r"\b(?:GET|HEAD|PUT|POST|DELETE) \S+", text)
        return f"{code[1]}: {code[2] or 'no message'}" + (f" ({request[0]})" if request else "")
    return text or type(error).__name__


def _code(error: Exception) -> str:
    """Returns what the server calls its error, or its status."""
    found = re.search(r"<Code>(\w+)</Code>", str(error)) or re.search(r"status code: (\d{3})", str(error))
    return found[1] if found else ""


def _passes(error: Exception) -> bool:
    """Returns whether the same may succeed a little later: the server failed or is busy, or an answer was lost."""
    if isinstance(error, OSError | UnauthenticatedError) or _code(error) in _FULL:
        return False
    status = re.search(r"status code: (\d)", str(error))
    return status is None or status[1] == "5" or _code(error) in _PASSES


class BucketObjects:
    """Objects of a bucket below a prefix. Credentials and endpoint come from the environment, as the tools of its
    provider read them. `publishes`: what may not be written raises StoreNotWritable."""

    def __init__(self, url: str, *, timing: Timing = QUICK, publishes: bool = False) -> None:
        self.url = url
        self._publishes = publishes
        self._timing = timing
        bucket_client(url, timing)  # before the time of a call counts

    def read(self, key: str) -> Stored | None:
        def fetched(store: Any) -> Stored:
            found = store.get(key)
            return Stored(content=bytes(found.bytes()), tag=self._tag(found.meta), age_s=_age_s(found.meta))

        try:
            return self._call(fetched, key)
        except FileNotFoundError:
            return None

    def create(self, key: str, content: bytes) -> str:
        tag = self._put_if(key, content, "create")
        if tag is None:
            raise ObjectExists(key=key, url=self.url)
        return tag

    def replace(self, key: str, content: bytes, tag: str) -> str:
        written = self._put_if(key, content, {"e_tag": tag, "version": tag})
        if written is None:
            raise ObjectChanged(key=key, url=self.url)
        return written

    def put(self, key: str, content: bytes) -> None:
        self._call(lambda store: store.put(key, content), key, sends=len(content))

    def keys(self, prefix: str, *, after: str = "") -> list[str]:
        return sorted(entry.key for entry in self.entries(prefix, after=after))

    def entries(self, prefix: str, *, after: str = "") -> list[Entry]:
        folder = prefix.rpartition("/")[0]
        found = self._call(lambda store: store.list(folder or None, offset=after or None).collect())
        return [
            Entry(key=each["path"], size=each["size"], age_s=_age_s(each))
            for each in found
            if each["path"].startswith(prefix) and each["path"] > after
        ]

    def names(self, prefix: str) -> list[str]:
        found = self._call(lambda store: store.list_with_delimiter(prefix.rstrip("/") or None))
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(path.removeprefix(prefix).rstrip("/") for path in paths)

    def remove(self, key: str) -> None:
        with suppress(FileNotFoundError):
            self._call(lambda store: store.delete(key), key, sends=0)

    def _put_if(self, key: str, content: bytes, mode: str | dict[str, str]) -> str | None:
        """The new tag; None when the condition does not hold."""
        with suppress(AlreadyExistsError, PreconditionError, FileNotFoundError):
            put = self._call(lambda store: store.put(key, content, mode=mode), key, sends=len(content))
            return self._tag(put)
        found = self.read(key)  # a retried request may meet the object that its first attempt wrote
        return found.tag if found is not None and found.content == content else None

    def _tag(self, meta: Mapping[str, Any]) -> str:
        return str(meta["version" if self.url.startswith("gs:") else "e_tag"])

    def _call(
        self, call: Callable[[Any], Answer], key: str | None = None, *, sends: int | None = None
    ) -> Answer:
        """Calls again after an answer was lost, and once with other credentials after those in use have expired.
        `sends`: the bytes in flight at once; None: it only reads."""
        if key is not None:
            checked_key(key)
        timing = replace(self._timing, read_s=self._timing.read_s + (sends or 0) // _STEP_BYTES * _STEP_S)
        tried, renewed, end = 0, False, time.monotonic() + timing.patience_s
        while True:
            tried += 1
            try:
                return call(bucket_client(self.url, timing))
            except FileNotFoundError as error:
                if _code(error) in _NO_BUCKET:
                    raise self._error(error) from error
                raise FileNotFoundError(key) from error
            except (AlreadyExistsError, PreconditionError):
                raise
            except BaseError as error:
                if _code(error) in _EXPIRED and not renewed:
                    _client.cache_clear()  # the next one reads them again
                    renewed = True
                elif not _passes(error) or tried >= timing.attempts or time.monotonic() > end:
                    raise self._error(error, writing=sends is not None) from error
                else:
                    if self._publishes:
                        logger.warning(f"{self.url} is asked again: {reason_of(error)}")
                    time.sleep(random.uniform(0.05, 0.1) * 2.0**tried)

    def _error(self, error: Exception, *, writing: bool = False) -> StoreError:
        code, reason = _code(error), reason_of(error)
        if code in _EXPIRED:
            reason = (
                f"its credentials have expired ({code}); renew them, or use ones that are refreshed (a role, web "
                "identity, SSO or credential_process)"
            )
        elif code == "RequestTimeTooSkewed":
            reason = f"the clock of this host is wrong: {reason}"
        elif writing and self._publishes and code in _FORBIDDEN | _FULL:
            return StoreNotWritable(path=self.url, reason=reason)
        return StoreUnreachable(url=self.url, reason=reason)


class BucketFiles(BucketObjects):
    """Objects with more patience, and files: several at a time, each tried again by itself."""

    def __init__(self, url: str) -> None:
        super().__init__(url, timing=PATIENT, publishes=True)

    def create_file(self, key: str, path: Path) -> None:
        """Writes the file in one request. Raises ObjectExists also when an earlier attempt of the same call has
        written it."""
        try:
            self._call(lambda store: store.put(key, path, mode="create"), key, sends=path.stat().st_size)
        except AlreadyExistsError as error:
            raise ObjectExists(key=key, url=self.url) from error

    def upload(self, files: Mapping[str, Path]) -> None:
        sizes = {key: path.stat().st_size for key, path in files.items()}
        parts = max(1, _AT_ONCE // max(1, sum(size > _PART_BYTES for size in sizes.values())))

        def send(key: str) -> None:
            chunk = max(_PART_BYTES, sizes[key] // _MOST_PARTS)
            self._call(
                lambda store: store.put(key, files[key], chunk_size=chunk, max_concurrency=parts),
                key,
                sends=min(sum(sizes.values()), _AT_ONCE * chunk),
            )

        _at_once(send, files)

    def download(self, files: Mapping[str, Path]) -> None:
        slots = threading.Semaphore(_AT_ONCE)  # bounds the parts in memory

        def fetch(key: str) -> None:
            with replacing(files[key]) as scratch, scratch.open("wb") as file:
                self._fetch(key, file.fileno(), slots)

        _at_once(fetch, files)

    def _fetch(self, key: str, file: int, slots: threading.Semaphore) -> None:
        """Fetches a large object in parts."""

        def begin(store: Any) -> tuple[int, Any]:
            found = store.get(key)
            size = int(found.meta["size"])
            return size, found.bytes() if size <= _PART_BYTES else b""

        def fetch(start: int) -> None:
            end = min(start + _PART_BYTES, size)
            with slots:
                content = self._call(lambda store: store.get_range(key, start=start, end=end), key)
                os.pwrite(file, content, start)

        with slots:
            size, first = self._call(begin, key)
            os.pwrite(file, first, 0)
        if size > _PART_BYTES:
            _at_once(fetch, range(0, size, _PART_BYTES))

    def abandon_uploads(self, older_than_s: float, prefix: str = "") -> int:
        """On S3; the other providers forget them by themselves, or by a rule of the bucket."""
        if not self.url.startswith("s3"):
            return 0
        import botocore.session
        from botocore.exceptions import BotoCoreError, ClientError

        bucket, _, base = self.url.partition("://")[2].strip("/").partition("/")
        try:
            client: Any = botocore.session.get_session().create_client("s3")
            pages = client.get_paginator("list_multipart_uploads")
            found = [
                each
                for page in pages.paginate(Bucket=bucket, Prefix=f"{base}/{prefix}".lstrip("/"))
                for each in page.get("Uploads", ())
                if time.time() - each["Initiated"].timestamp() > older_than_s
            ]
            for each in found:
                client.abort_multipart_upload(Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])
        except (ClientError, BotoCoreError) as error:
            raise self._error(error, writing=True) from error
        return len(found)


def _at_once(do: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Does it for all items. The first failure ends it."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(do, items):
            pass


def _age_s(meta: Mapping[str, Any]) -> float:
    return float((_now() - meta["last_modified"]).total_seconds())


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)
