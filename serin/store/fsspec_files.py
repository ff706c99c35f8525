"""Files of a store at any other fsspec URL, for a single host: its file system has no conditional writes that could be
relied on, so two hosts that write at the same moment may overwrite each other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import fsspec

from serin.errors import ObjectChanged, ObjectExists, StoreNotConditional
from serin.store.objects import Entry, Stored, checked_key


class FsspecFiles:
    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def read(self, key: str) -> Stored | None:
        try:
            content = bytes(self._fs.cat_file(self._path(key)))
        except FileNotFoundError:
            return None
        return Stored(content=content, tag=_tag(content))

    def create(self, key: str, content: bytes) -> str:
        self._make_folder(key)
        try:
            self._fs.pipe_file(self._path(key), content, mode="create")
        except FileExistsError:
            raise ObjectExists(key=key, url=self.url) from None
        return _tag(content)

    def replace(self, key: str, content: bytes, tag: str) -> str:
        found = self.read(key)
        if found is None or found.tag != tag:
            raise ObjectChanged(key=key, url=self.url)
        self.put(key, content)
        return _tag(content)

    def put(self, key: str, content: bytes) -> None:
        self._make_folder(key)
        self._fs.pipe_file(self._path(key), content)

    def keys(self, prefix: str, *, after: str = "") -> list[str]:
        return sorted(entry.key for entry in self.entries(prefix) if entry.key > after)

    def entries(self, prefix: str, *, after: str = "") -> list[Entry]:
        self._fs.invalidate_cache()
        found = self._fs.find(f"{self._root}/{prefix.rpartition('/')[0]}", detail=True).values()
        names = ((entry["name"].removeprefix(self._root).lstrip("/"), entry["size"]) for entry in found)
        return [
            Entry(key=key, size=size, age_s=0.0)
            for key, size in names
            if key.startswith(prefix) and key > after
        ]

    def names(self, prefix: str) -> list[str]:
        return sorted({key.removeprefix(prefix).partition("/")[0] for key in self.keys(prefix)})

    def remove(self, key: str, *, tag: str | None = None) -> None:
        found = self.read(key) if tag else None
        if found is not None and found.tag != tag:
            raise ObjectChanged(key=key, url=self.url)
        if self._fs.exists(self._path(key)):
            self._fs.rm_file(self._path(key))

    def create_file(self, key: str, path: Path) -> None:  # noqa: ARG002
        raise StoreNotConditional(url=self.url)

    def upload(self, files: Mapping[str, Path]) -> None:
        for key, path in files.items():
            self._make_folder(key)
            self._fs.put_file(str(path), self._path(key))

    def download(self, files: Mapping[str, Path]) -> None:
        for key, path in files.items():
            self._fs.get_file(self._path(key), str(path))

    def abandon_uploads(self, older_than_s: float, prefix: str = "") -> int:  # noqa: ARG002
        return 0

    def _make_folder(self, key: str) -> None:
        self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"


def _tag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
