"""Objects on S3, or a server that speaks its protocol with conditional writes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from serin.errors import ObjectChanged, ObjectExists, StoreError
from serin.store.objects import Entry, Stored, checked_key
from serin.store.s3_client import (
    BROKEN,
    LOST,
    MISSING,
    QUICK,
    Timing,
    error_code,
    expired,
    s3_client,
    store_error,
)

Answer = TypeVar("Answer")


class S3Objects:
    """Objects of a bucket below a prefix. Credentials and endpoint come from the environment, as every AWS tool reads
    them. `publishes`: what may not be written raises StoreNotWritable."""

    def __init__(self, url: str, *, timing: Timing = QUICK, publishes: bool = False) -> None:
        self.url = url
        self._publishes = publishes
        self._bucket, _, prefix = url.removeprefix("s3://").strip("/").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._timing = timing
        self._client = s3_client(timing)

    def read(self, key: str) -> Stored | None:
        name = self._prefix + checked_key(key)

        def fetched(s3: Any) -> Stored:
            answer = s3.get_object(Bucket=self._bucket, Key=name)
            return Stored(content=bytes(answer["Body"].read()), tag=answer["ETag"], age_s=_age_s(answer))

        try:
            return self._patiently(fetched)
        except ClientError as error:
            if error_code(error) in MISSING:
                return None
            raise self._error(error) from error
        except BotoCoreError as error:
            raise self._error(error) from error

    def create(self, key: str, content: bytes) -> str:
        tag = self._put_if(key, content, missing=False, IfNoneMatch="*")
        if tag is None:
            raise ObjectExists(key=key, url=self.url)
        return tag

    def replace(self, key: str, content: bytes, tag: str) -> str:
        written = self._put_if(key, content, missing=True, IfMatch=tag)
        if written is None:
            raise ObjectChanged(key=key, url=self.url)
        return written

    def put(self, key: str, content: bytes) -> None:
        try:
            self._call("put_object", key, Body=content)
        except (ClientError, BotoCoreError) as error:
            raise self._error(error, writing=True) from error

    def keys(self, prefix: str, *, after: str = "") -> list[str]:
        return sorted(entry.key for entry in self.entries(prefix, after=after))

    def entries(self, prefix: str, *, after: str = "") -> list[Entry]:
        """The objects whose keys begin with `prefix`, with their sizes and ages."""
        start = {"StartAfter": self._prefix + after} if after else {}
        return [
            Entry(
                key=found["Key"].removeprefix(self._prefix),
                size=found["Size"],
                age_s=(_date(page) - found["LastModified"]).total_seconds(),
            )
            for page in self._pages(prefix, **start)
            for found in page.get("Contents", ())
        ]

    def names(self, prefix: str) -> list[str]:
        """The names directly below `prefix`, which ends with a slash."""
        found = [
            found[kind]
            for page in self._pages(prefix, Delimiter="/")
            for group, kind in (("CommonPrefixes", "Prefix"), ("Contents", "Key"))
            for found in page.get(group, ())
        ]
        return sorted(name.removeprefix(self._prefix + prefix).rstrip("/") for name in found)

    def remove(self, key: str, *, tag: str | None = None) -> None:
        """`tag`: only if it still is that content, where the server can do that (else whatever it is)."""
        try:
            self._call("delete_object", key, **({"IfMatch": tag} if tag else {}))
        except ClientError as error:
            if error_code(error) in MISSING:
                return
            if tag and error_code(error) in LOST:
                raise ObjectChanged(key=key, url=self.url) from error
            raise self._error(error, writing=True) from error
        except BotoCoreError as error:
            raise self._error(error, writing=True) from error

    def _put_if(self, key: str, content: bytes, *, missing: bool, **condition: str) -> str | None:
        """The new tag; None when the condition does not hold."""
        try:
            return str(self._call("put_object", key, Body=content, **condition)["ETag"])
        except ClientError as error:
            if error_code(error) not in (LOST | MISSING if missing else LOST):
                raise self._error(error, writing=True) from error
        except BotoCoreError as error:
            raise self._error(error, writing=True) from error
        found = self.read(key)  # a retried request may meet the object that its first attempt wrote
        return found.tag if found is not None and found.content == content else None

    def _call(self, operation: str, key: str, **more: Any) -> dict[str, Any]:
        name = self._prefix + checked_key(key)
        return dict(self._patiently(lambda s3: getattr(s3, operation)(Bucket=self._bucket, Key=name, **more)))

    def _pages(self, prefix: str, **more: Any) -> list[dict[str, Any]]:
        where = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, **more}
        try:
            return self._patiently(lambda s3: list(s3.get_paginator("list_objects_v2").paginate(**where)))
        except (ClientError, BotoCoreError) as error:
            raise self._error(error) from error

    def _patiently(self, call: Callable[[Any], Answer]) -> Answer:
        """Calls again after a response that broke off, which botocore does not, and once with other credentials after
        those in use have expired."""
        tried, renewed, end = 0, False, time.monotonic() + self._timing.patience_s
        while True:
            used, tried = self._client.s3, tried + 1
            try:
                return call(used)
            except ClientError as error:
                if renewed or not expired(error) or not self._client.renew(used):
                    raise
                renewed = True
            except BROKEN as error:
                if tried >= self._timing.attempts or time.monotonic() > end:
                    raise HTTPClientError(error=error) from error
                time.sleep(random.uniform(0.05, 0.1) * 2.0**tried)

    def _error(self, error: Exception, *, writing: bool = False) -> StoreError:
        return store_error(self.url, error, writing=writing and self._publishes)


def _date(answer: dict[str, Any]) -> datetime:
    """When the server answered, by its own clock."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])


def _age_s(answer: dict[str, Any]) -> float:
    return float((_date(answer) - answer["LastModified"]).total_seconds())
