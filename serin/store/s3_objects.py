"""Objects on S3, or a server that speaks its protocol with conditional writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from serin.errors import ObjectChanged, ObjectExists, StoreUnreachable
from serin.store.objects import Stored, checked_key

_MISSING: Final = {"NoSuchKey", "404", "NotFound"}
_LOST: Final = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
_CONNECT_S, _READ_S, _ATTEMPTS = 2.0, 5.0, 3  # a controller must notice within seconds that it is cut off


class S3Objects:
    """Objects of a bucket below a prefix. Credentials and endpoint come from the environment, as every AWS tool reads
    them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._bucket, _, prefix = url.removeprefix("s3://").strip("/").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        config = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        )
        self._s3 = botocore.session.get_session().create_client("s3", config=config)

    def read(self, key: str) -> Stored | None:
        try:
            answer = self._call(self._s3.get_object, key)
            return Stored(content=self._body(answer), tag=answer["ETag"])
        except ClientError as error:
            if _code(error) in _MISSING:
                return None
            raise self._unreachable(error) from error

    def create(self, key: str, content: bytes) -> str:
        try:
            return str(self._call(self._s3.put_object, key, Body=content, IfNoneMatch="*")["ETag"])
        except ClientError as error:
            if _code(error) not in _LOST:
                raise self._unreachable(error) from error
        found = self.read(key)  # a retried request may meet the object that its first attempt wrote
        if found is not None and found.content == content:
            return found.tag
        raise ObjectExists(key=key, url=self.url)

    def replace(self, key: str, content: bytes, tag: str) -> str:
        try:
            return str(self._call(self._s3.put_object, key, Body=content, IfMatch=tag)["ETag"])
        except ClientError as error:
            if _code(error) not in _LOST | _MISSING:
                raise self._unreachable(error) from error
        found = self.read(key)
        if found is not None and found.content == content:
            return found.tag
        raise ObjectChanged(key=key, url=self.url)

    def put(self, key: str, content: bytes) -> None:
        try:
            self._call(self._s3.put_object, key, Body=content)
        except ClientError as error:
            raise self._unreachable(error) from error

    def keys(self, prefix: str, *, after: str = "") -> list[str]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket,
            Prefix=self._prefix + prefix,
            **({"StartAfter": self._prefix + after} if after else {}),
        )
        try:
            found = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        except (ClientError, BotoCoreError) as error:
            raise self._unreachable(error) from error
        return sorted(key.removeprefix(self._prefix) for key in found)

    def remove(self, key: str) -> None:
        try:
            self._call(self._s3.delete_object, key)
        except ClientError as error:
            raise self._unreachable(error) from error

    def _call(self, call: Callable[..., dict[str, Any]], key: str, **more: Any) -> dict[str, Any]:
        try:
            return call(Bucket=self._bucket, Key=self._prefix + checked_key(key), **more)
        except BotoCoreError as error:
            raise self._unreachable(error) from error

    def _body(self, answer: dict[str, Any]) -> bytes:
        try:
            return bytes(answer["Body"].read())
        except (BotoCoreError, OSError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> StoreUnreachable:
        return StoreUnreachable(url=self.url, reason=str(error))


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
