"""Small objects under a URL, with conditional writes: the meeting point of processes on several hosts.

A key is a path such as `rollouts/flights/decisions/000000000007.json`. Of several writers that create the same key, one
succeeds. A folder (also one on a shared file system) and a bucket (bucket.py) can do that.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from serin.errors import NameInvalid, ObjectChanged, ObjectExists
from serin.machine.durable import replacing, sync, write_whole
from serin.machine.locks import locked

_SCRATCH = re.compile(r"\..+\.[0-9a-f]{12}")  # not the locks beside objects
BUCKETS: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")  # schemes of URLs


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object as it was read. `tag` identifies this content of it for `Objects.replace`; `age_s`: since it was
    written; its store refuses a host whose clock is minutes off."""

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


class Files(Objects, Protocol):
    """Objects and files of a store."""

    def entries(self, prefix: str, *, after: str = "") -> list[Entry]:
        """Returns the objects whose keys begin with `prefix`, with their sizes and ages."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Returns the names directly below `prefix`, which ends with a slash."""
        ...

    def create_file(self, key: str, path: Path) -> None:
        """Writes the file under a key that does not exist yet, else raises ObjectExists."""
        ...

    def upload(self, files: Mapping[str, Path]) -> None:
        """Writes the files (by key)."""
        ...

    def download(self, files: Mapping[str, Path]) -> None:
        """Fetches the objects (by key) into files, each whole or not at all. FileNotFoundError: one is not there."""
        ...

    def abandon_uploads(self, older_than_s: float, prefix: str = "") -> int:
        """Removes unfinished uploads of processes that were killed, of keys that begin with `prefix`; returns how
        many."""
        ...


class FolderObjects:
    """Objects and files in a folder. Durable once a call returns."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder)
        self._folder = folder

    def read(self, key: str) -> Stored | None:
        try:
            content = self._path(key).read_bytes()
            age_s = time.time() - self._path(key).stat().st_mtime
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        return Stored(content=content, tag=tag_of(content), age_s=age_s)

    def create(self, key: str, content: bytes) -> str:
        self._create(key, lambda path: path.write_bytes(content))
        return tag_of(content)

    def _create(self, key: str, write: Callable[[Path], object]) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        try:
            write(scratch)
            sync(scratch)
            os.link(scratch, path)
        except FileExistsError:
            raise ObjectExists(key=key, url=self.url) from None
        finally:
            scratch.unlink(missing_ok=True)
        try:
            sync(path.parent)
        except OSError:  # it was not written
            path.unlink(missing_ok=True)
            raise

    def replace(self, key: str, content: bytes, tag: str) -> str:
        path = self._path(key)
        if not path.parent.is_dir():
            raise ObjectChanged(key=key, url=self.url)
        with locked(path.with_name(f".{path.name}.lock")):
            found = self.read(key)
            if found is None or found.tag != tag:
                raise ObjectChanged(key=key, url=self.url)
            write_whole(path, content)
        return tag_of(content)

    def put(self, key: str, content: bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)

    def keys(self, prefix: str, *, after: str = "") -> list[str]:
        root, top = str(self._folder), self._folder / prefix.rpartition("/")[0]
        found = []
        for folder, _, names in os.walk(top):
            inside = os.path.relpath(folder, root).replace(os.sep, "/") + "/"
            inside = "" if inside == "./" else inside
            found += [inside + name for name in names if not name.startswith(".")]  # scratch files and locks
        return sorted(key for key in found if key.startswith(prefix) and key > after)

    def remove(self, key: str) -> None:
        path = self._path(key)
        with suppress(FileNotFoundError):
            path.unlink()
            sync(path.parent)

    def entries(self, prefix: str, *, after: str = "") -> list[Entry]:
        now, found = time.time(), []
        for key in self.keys(prefix, after=after):
            status = self._path(key).stat()
            found.append(Entry(key=key, size=status.st_size, age_s=now - status.st_mtime))
        return found

    def names(self, prefix: str) -> list[str]:
        folder = self._folder / prefix
        entries = folder.iterdir() if folder.is_dir() else ()
        return sorted(entry.name for entry in entries if not entry.name.startswith("."))

    def create_file(self, key: str, path: Path) -> None:
        self._create(key, lambda scratch: shutil.copyfile(path, scratch))

    def upload(self, files: Mapping[str, Path]) -> None:
        for key, path in files.items():
            self._copy(path, self._path(key))

    def download(self, files: Mapping[str, Path]) -> None:
        for key, path in files.items():
            self._copy(self._path(key), path)

    def abandon_uploads(self, older_than_s: float, prefix: str = "") -> int:
        """Removes unfinished files of processes that were killed, of keys that begin with `prefix`; returns how
        many."""
        left = [path for path in (self._folder / prefix).rglob(".*") if _SCRATCH.fullmatch(path.name)]
        old = [path for path in left if time.time() - path.stat().st_mtime >= older_than_s]
        for path in old:
            path.unlink(missing_ok=True)
            sync(path.parent)
        return len(old)

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as scratch:
            shutil.copyfile(source, scratch)
            sync(scratch)
        sync(target.parent)

    def _path(self, key: str) -> Path:
        return self._folder / checked_key(key)


def swap(objects: Objects, key: str, content: bytes, tag: str | None) -> str:
    """Writes an object if it still is the one with `tag` (None: if there still is none) and returns the new tag. Else
    raises ObjectChanged or ObjectExists."""
    return objects.create(key, content) if tag is None else objects.replace(key, content, tag)


def is_bucket(url: str) -> bool:
    """Returns whether the URL is of S3, Google Cloud Storage or Azure."""
    return url.partition("://")[0] in BUCKETS and "://" in url


def checked_key(key: str) -> str:
    """Returns a key that stays below its URL, else raises NameInvalid."""
    if any(part.startswith(".") or not part for part in key.split("/")):
        raise NameInvalid(kind="key", name=key, rule="a relative path without empty and hidden parts")
    return key


def tag_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
