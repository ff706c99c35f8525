"""The marker of a folder in an object store: which files it has, with their digests, and where they are.

published/<place>.json     the marker, written last and once
<place>/<attempt>/<name>   the files; each attempt to publish has another folder, so that two never mix
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from serin.errors import BundleBroken, ObjectChanged, StoreNotWritable, StoreUnreachable
from serin.machine import environment
from serin.machine.typed_json import Document
from serin.store.objects import Objects

_HASHED_AT_ONCE = 4
RENEWED_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Document, form="serin.store.published", omit=("used",)):
    """`attempt`: the folder of the files below the place. `used`: changes when somebody has used them."""

    attempt: str
    by: str  # the host
    files: Mapping[str, ListedFile]
    used: str | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_json(), indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes, *, path: str) -> Published:
        try:
            found = cls.load(content)
            if any(".." in name.split("/") or name.startswith("/") for name in found.files):
                raise ValueError("a file is outside of its folder")
            return found
        except ValueError as error:
            raise BundleBroken(path=path, reason=f"{type(error).__name__}: {error}") from error


def find_published(files: Objects, place: str) -> Published | None:
    """Returns what is published at a place, and writes that it is used, at most once a day: `serin gc` removes what was
    not used for long (remote_retention.py). A store that is only read keeps its marker as it is."""
    key = marker_key(place)
    found = files.read(key)
    if found is None:
        return None
    published = Published.from_bytes(found.content, path=f"{files.url}/{key}")
    if found.age_s > RENEWED_S:
        with suppress(ObjectChanged, StoreNotWritable, StoreUnreachable):
            files.replace(key, replace(published, used=secrets.token_hex(8)).to_bytes(), found.tag)
    return published


def marker_key(place: str) -> str:
    return f"published/{place}.json"


def list_files(folder: Path) -> Published:
    """Reads every file of a folder for its digest, as a new attempt to publish it."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
        files = dict(zip(names, threads.map(lambda name: listed(folder / name), names), strict=True))
    return Published(attempt=secrets.token_hex(8), by=environment.host(), files=files)


def listed(path: Path) -> ListedFile:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ListedFile(size=path.stat().st_size, sha256=digest)


def is_as_listed(path: Path, file: ListedFile) -> bool:
    """Whether the file is there with its size and digest."""
    try:
        if path.is_symlink() or path.stat().st_size != file.size:
            return False
        return listed(path).sha256 == file.sha256
    except OSError:
        return False
