"""A store on a local or shared file system: a folder is filled in work/ and renamed into place."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from serin.errors import BundleBroken, ObjectExists
from serin.machine.durable import sync, write_whole
from serin.machine.in_use import hold_until_exit, holding
from serin.machine.locks import locked
from serin.store.objects import FolderObjects
from serin.store.published import make_home_of

_SYNCS_AT_ONCE = 8


class LocalPlaces:
    def __init__(self, root: Path) -> None:
        self._root = root

    def workspace_parent(self) -> Path:
        parent = self._root / "work"
        make_home_of(parent)
        return parent

    def workspace_lock(self, name: str) -> Path:
        return self.lock(f"work/{name}")

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        lock = self.workspace_lock(name)
        with holding(lock):
            yield
            lock.unlink(missing_ok=True)

    def lock(self, relative: str) -> Path:
        return self._root / "locks" / relative

    def read(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, key: str, content: bytes) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)

    def create(self, key: str, content: str = "") -> bool:
        try:
            FolderObjects(self._root).create(key, content.encode())
        except ObjectExists:
            return False
        return True

    def change(self, key: str, change: Callable[[bytes | None], bytes]) -> None:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / ".lock"):
            self.write(key, change(self.read(key)))

    def names(self, folder: str) -> list[str]:
        path = self._root / folder
        found = path.iterdir() if path.is_dir() else ()
        return sorted(entry.name for entry in found if not entry.name.startswith("."))  # no scratch files

    def published(self, folder: str, *, marker: str) -> list[str]:
        return [name for name in self.names(folder) if self.is_published(f"{folder}/{name}", marker=marker)]

    def is_published(self, place: str, *, marker: str) -> bool:
        return (self._root / place / marker).is_file()

    def publish(
        self, folder: Path, place: str, *, marker: str, lasting: Collection[Path], same: bool
    ) -> Path:
        self._hold(place)  # the same one may have been published long ago
        target = self._root / place
        if (target / marker).is_file():
            return self._theirs(folder, place, marker, same=same)
        target.parent.mkdir(parents=True, exist_ok=True)
        rest = [path for path in folder.rglob("*") if path not in lasting]
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as threads:  # a disk takes several at the price of one
            list(threads.map(sync, rest))
        sync(folder)
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not (target / marker).is_file():
                raise
            return self._theirs(folder, place, marker, same=same)
        sync(target.parent)
        return target

    def _theirs(self, folder: Path, place: str, marker: str, *, same: bool) -> Path:
        """Another process published there in the meantime."""
        target = self._root / place
        if same and (target / marker).read_bytes() != (folder / marker).read_bytes():
            raise BundleBroken(path=place, reason="another process published other files there")
        return target

    def fetch(self, place: str, *, marker: str, hold: bool) -> Path | None:
        if hold:
            self._hold(place)
        folder = self._root / place
        return folder if (folder / marker).is_file() else None

    def here(self, place: str, *, marker: str, hold: bool) -> Path | None:
        return self.fetch(place, marker=marker, hold=hold)

    def remove(self, place: str) -> None:
        path = self._root / place
        for marker in ("dataset.json", "manifest.json"):
            (path / marker).unlink(missing_ok=True)
        if path.is_dir():
            shutil.rmtree(path)

    def _hold(self, relative: str) -> None:
        if self._root.is_dir():
            hold_until_exit(self.lock(relative))
