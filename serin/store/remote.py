"""A store on an object store: files are uploaded first and the marker last, once (file_list.py).

A reader that finds no marker finds nothing, so an upload that was cut short is never seen. Files are read through a
cache on this host (cache.py), which also serves versions that it has while the store does not answer.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from serin.errors import BundleBroken, ObjectChanged, ObjectExists, StoreNotWritable, StoreUnreachable
from serin.machine import environment
from serin.machine.in_use import holding
from serin.machine.private import make_private
from serin.store.cache import Cache
from serin.store.file_list import Published, list_files, marker_key, renew_marker
from serin.store.objects import Files
from serin.store.published import make_home_of

logger = logging.getLogger(__name__)

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


def copies_of(url: str, cache: Path) -> Cache:
    """The copies on this host of what the store at `url` has, in the folder of all copies."""
    return Cache(cache / hashlib.sha256(url.encode()).hexdigest()[:12], environment.cache_bytes())


class RemotePlaces:
    def __init__(self, files: Files, cache: Path) -> None:
        self.files = files
        self._cache = copies_of(files.url, cache)
        self._folder = self._cache.root

    def workspace_parent(self) -> Path:
        make_home_of(self._folder)
        make_private(self._folder.parent)  # what was fetched is for those alone who may read it there
        scratch = environment.scratch()
        return self._cache.workspace_parent() if scratch is None else make_private(scratch) / "work"

    def workspace_lock(self, name: str) -> Path:
        return self._folder / "in-use" / "work" / name

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        lock = self.workspace_lock(name)
        with holding(lock):
            yield
            lock.unlink(missing_ok=True)

    def read(self, key: str) -> bytes | None:
        found = self.files.read(key)
        return None if found is None else found.content

    def write(self, key: str, content: bytes) -> None:
        self.files.put(key, content)

    def create(self, key: str, content: str = "") -> bool:
        mine = (
            content or f"{environment.host()} {secrets.token_hex(16)}\n"
        )  # a retry must know its own object
        try:
            self.files.create(key, mine.encode())
        except ObjectExists:
            return False
        return True

    def change(self, key: str, change: Callable[[bytes | None], bytes]) -> None:
        while True:
            found = self.files.read(key)
            content = change(None if found is None else found.content)
            with suppress(ObjectExists, ObjectChanged):  # another one was faster: what it wrote is changed
                if found is None:
                    self.files.create(key, content)
                elif found.content != content:
                    self.files.replace(key, content, found.tag)
                return

    def names(self, folder: str) -> list[str]:
        return self.files.names(f"{folder}/")

    def published(self, folder: str, *, marker: str) -> list[str]:  # noqa: ARG002
        return sorted(name.removesuffix(".json") for name in self.files.names(f"published/{folder}/"))

    def is_published(self, place: str, *, marker: str) -> bool:  # noqa: ARG002
        return self.files.read(marker_key(place)) is not None

    def publish(
        self,
        folder: Path,
        place: str,
        *,
        marker: str,
        lasting: Collection[Path],  # noqa: ARG002  -- they are uploaded like the others
        same: bool,
    ) -> Path:
        mine = list_files(folder)
        if self.files.read(marker_key(place)) is None:
            self.files.upload({f"{place}/{mine.attempt}/{name}": folder / name for name in mine.files})
            with suppress(ObjectExists):
                self.files.create(marker_key(place), mine.to_bytes())
                with self._room():
                    return self._cache.adopt(place, mine, folder, hold=True)
        theirs = self._marker(place)
        if theirs is not None and theirs.files == mine.files:
            with self._room():
                return self._cache.adopt(place, theirs, folder, hold=True)
        if same:
            raise BundleBroken(path=place, reason="another process published other files there")
        found = self.fetch(place, marker=marker, hold=True)
        if found is None:
            raise StoreUnreachable(url=self.files.url, reason=f"{place} was removed while it was published")
        return found

    def fetch(self, place: str, *, marker: str, hold: bool) -> Path | None:  # noqa: ARG002
        with self._room():
            self.workspace_parent()
            try:
                published = self._marker(place)
            except StoreUnreachable as error:
                known = self._cache.known(place, hold=hold)
                if known is None:
                    raise
                logger.warning(f"{error}; using the copy of {place} on this host")
                return known
            if published is None:
                self._cache.forget(place)
                return None
            base = f"{place}/{published.attempt}"

            def download(files: Mapping[str, Path]) -> None:
                self.files.download({f"{base}/{name}": path for name, path in files.items()})

            try:
                return self._cache.get(place, published, download, hold=hold)
            except FileNotFoundError as error:
                if self._marker(place) is None:
                    return None  # removed in the meantime
                raise BundleBroken(path=place, reason=f"{error} is missing in {self.files.url}") from error

    def here(self, place: str, *, marker: str, hold: bool) -> Path | None:  # noqa: ARG002
        return self._cache.known(place, hold=hold)

    def remove(self, place: str) -> None:
        self.files.remove(marker_key(place))
        for key in self.files.keys(f"{place}/"):
            self.files.remove(key)
        self._cache.forget(place)

    def _marker(self, place: str) -> Published | None:
        key = marker_key(place)
        found = self.files.read(key)
        if found is None:
            return None
        published = Published.from_bytes(found.content, path=f"{self.files.url}/{key}")
        renew_marker(self.files, key, found)
        return published

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise StoreNotWritable(path=str(self._folder), reason=error.strerror or str(error)) from error
