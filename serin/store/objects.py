"""Small objects under a URL, with conditional writes: the meeting point of processes on several hosts.

A key is a path such as `rollouts/flights/decisions/000000000007.json`. Of several writers that create the same key, one
succeeds. A folder (also one on a shared file system) and S3 can do that; other object stores are refused.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from serin.errors import (
    NameInvalid,
    ObjectChanged,
    ObjectExists,
    StoreError,
    StoreNotConditional,
    StoreUnreachable,
)
from serin.machine.durable import sync, write_whole
from serin.machine.locks import locked

_CLIENT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object as it was read. `tag` identifies this content of it for `Objects.replace`; `age_s`: since it was
    written, by the clock of an object store."""

    content: bytes
    tag: str
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object in a listing."""

    key: str
    size: int
    age_s: float


class Objects(Protocol):
    """Raises StoreUnreachable, and nothing else of its kind, when the store does not answer or refuses the caller."""

    url: str

    def read(self, key: str) -> Stored | None:
        """Returns the object, None when there is none."""
        ...

    def create(self, key: str, content: bytes) -> str:
        """Writes an object that does not exist yet and returns its tag, else raises ObjectExists.

        Two writers must not have the same content (name the writer in it): one that meets its own content takes it
        for its own. After StoreUnreachable it may have been written or not: read it to find out.
        """
        ...

    def replace(self, key: str, content: bytes, tag: str) -> str:
        """Writes an object if it still is the one with `tag` and returns the new tag, else raises ObjectChanged."""
        ...

    def put(self, key: str, content: bytes) -> None:
        """Writes an object, whatever was there. For objects with a single writer."""
        ...

    def keys(self, prefix: str, *, after: str = "") -> Sequence[str]:
        """Returns the keys that begin with `prefix` and sort after `after`, sorted."""
        ...

    def remove(self, key: str) -> None:
        """Removes an object; one that is not there is removed already."""
        ...


def open_objects(url: str) -> Objects:
    """Returns the objects under the URL of a store (`environment.store_url()`): a folder, `file://` or `s3://`."""
    if url.startswith("s3://"):
        from serin.store.s3_objects import S3Objects  # botocore is in an extra

        return S3Objects(url)
    if "://" in url and not url.startswith("file://"):
        raise StoreNotConditional(url=url)
    return FolderObjects(Path(url.removeprefix("file://")))


def check_conditional(objects: Objects) -> None:
    """Raises StoreNotConditional for a store that accepts conditional writes and ignores the condition."""
    key = f"cluster/probe/{secrets.token_hex(8)}.json"
    try:
        objects.create(key, b'"first"')
        try:
            objects.create(key, b'"second"')
        except ObjectExists:
            return
        raise StoreNotConditional(url=objects.url)
    finally:
        objects.remove(key)


class StoreProbe:
    """Asks a store for an answer, beside the caller. A store that hangs, also a file system, holds up nobody."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._problem: StoreError | OSError | None = None
        self._asked, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._ask, name="store-probe", daemon=True).start()

    def check(self, within_s: float) -> None:
        """Raises StoreUnreachable unless the store answers in time; the time to make a client does not count."""
        self._asked.wait(_CLIENT_S)
        if not self._ended.wait(within_s):
            raise StoreUnreachable(url=self._url, reason=f"it does not answer within {within_s:g} s")
        if isinstance(self._problem, OSError):
            raise StoreUnreachable(url=self._url, reason=str(self._problem)) from self._problem
        if self._problem is not None:
            raise self._problem

    def _ask(self) -> None:
        try:
            objects = open_objects(self._url)
            self._asked.set()
            objects.read("cluster/probe/answer.json")
        except StoreNotConditional:
            pass  # it is not shared: nobody waits for it
        except (StoreError, OSError) as error:
            self._problem = error
        finally:
            self._asked.set()
            self._ended.set()


def check_answers(url: str, within_s: float) -> None:
    """Raises StoreUnreachable unless the store answers in time."""
    StoreProbe(url).check(within_s)


class FolderObjects:
    """Objects as files. Durable once a call returns."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder)
        self._folder = folder

    def read(self, key: str) -> Stored | None:
        try:
            content = self._path(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        return Stored(content=content, tag=_tag(content))

    def create(self, key: str, content: bytes) -> str:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        try:
            scratch.write_bytes(content)
            sync(scratch)
            os.link(scratch, path)
        except FileExistsError:
            raise ObjectExists(key=key, url=self.url) from None
        finally:
            scratch.unlink(missing_ok=True)
        sync(path.parent)
        return _tag(content)

    def replace(self, key: str, content: bytes, tag: str) -> str:
        path = self._path(key)
        if not path.parent.is_dir():
            raise ObjectChanged(key=key, url=self.url)
        with locked(path.with_name(f".{path.name}.lock")):
            found = self.read(key)
            if found is None or found.tag != tag:
                raise ObjectChanged(key=key, url=self.url)
            write_whole(path, content)
        return _tag(content)

    def put(self, key: str, content: bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)

    def keys(self, prefix: str, *, after: str = "") -> list[str]:
        top = self._folder / prefix.rpartition("/")[0]
        found = (path.relative_to(self._folder).as_posix() for path in top.rglob("*") if path.is_file())
        shown = (
            key for key in found if not key.rpartition("/")[2].startswith(".")
        )  # scratch files and locks
        return sorted(key for key in shown if key.startswith(prefix) and key > after)

    def remove(self, key: str) -> None:
        path = self._path(key)
        with suppress(FileNotFoundError):
            path.unlink()
            sync(path.parent)

    def _path(self, key: str) -> Path:
        return self._folder / checked_key(key)


def checked_key(key: str) -> str:
    """Returns a key that stays below its URL, else raises NameInvalid."""
    if any(part.startswith(".") or not part for part in key.split("/")):
        raise NameInvalid(kind="key", name=key, rule="a relative path without empty and hidden parts")
    return key


def _tag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
