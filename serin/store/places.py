"""Where a store has its published folders: on a local or shared file system, or on an object store.

On a file system a folder is filled in work/ and renamed into place. On an object store its files are uploaded first and
the marker last, once (file_list.py). A reader that finds no marker finds nothing, so an upload that was cut short is
never seen. Files are read through a cache on this host (cache.py), which also serves versions that it has while the
store does not answer.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from serin.errors import BundleBroken, ObjectExists, StoreNotWritable, StoreUnreachable
from serin.machine import environment
from serin.machine.durable import make_private, sync
from serin.machine.locks import hold_until_exit
from serin.store.cache import Cache
from serin.store.file_list import Published, find_published, is_as_listed, list_files, listed, marker_key
from serin.store.objects import Files
from serin.store.published import make_home_of

logger = logging.getLogger(__name__)

_SYNCS_AT_ONCE = 8
_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def writing_to(place: str) -> Iterator[None]:
    """Raises StoreNotWritable where the disk is full or writing is not allowed."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise StoreNotWritable(path=place, reason=error.strerror or str(error)) from error


def copies_of(url: str, cache: Path) -> Cache:
    """The copies on this host of what the store at `url` has, in the folder of all copies."""
    return Cache(
        cache / hashlib.sha256(url.encode()).hexdigest()[:12],
        environment.number_of_bytes("SERIN_CACHE_BYTES"),
    )


class LocalPlaces:
    """Folders on a file system. RemotePlaces has the same methods."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def workspace_parent(self) -> Path:
        """Where folders are filled."""
        parent = self._root / "work"
        make_home_of(parent)
        return parent

    def workspace_lock(self, name: str) -> Path:
        """Held while a folder in there is in use."""
        return self.lock(f"work/{name}")

    def lock(self, relative: str) -> Path:
        return self._root / "locks" / relative

    def published(self, folder: str, *, marker: str) -> list[str]:
        """The names in a folder that are published folders, sorted."""
        return sorted(path.parent.name for path in (self._root / folder).glob(f"[!.]*/{marker}"))

    def publish(
        self,
        folder: Path,
        place: str,
        *,
        marker: str,
        lasting: Collection[Path],
        same: bool,
        read_back: bool,  # noqa: ARG002  -- the files stay where they are
    ) -> Path:
        """Makes a folder visible, at once and whole; returns it on a local path, where it is in use until this process
        ends. Another may have been published there first: it is returned, with `same` only if it is the same.
        `read_back`: what was uploaded is compared before it is visible."""
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
        """The published folder on a local path. `hold`: it is in use until this process ends."""
        if hold:
            self._hold(place)
        folder = self._root / place
        return folder if (folder / marker).is_file() else None

    def here(self, place: str, *, marker: str, hold: bool) -> Path | None:
        """The published folder if it is whole on this host; an object store is not asked."""
        return self.fetch(place, marker=marker, hold=hold)

    def marker_digest(self, place: str, *, marker: str) -> str | None:
        """The SHA-256 of the marker of a published folder; None when there is no such folder."""
        folder = self.here(place, marker=marker, hold=False)
        return None if folder is None else listed(folder / marker).sha256

    def has_file(self, place: str, name: str, *, marker: str) -> bool | None:
        """Whether a published folder has this file; None when there is no such folder."""
        folder = self.here(place, marker=marker, hold=False)
        return None if folder is None else (folder / name).is_file()

    def read_file(self, place: str, name: str) -> bytes | None:
        """One file of a published folder, without fetching the others or counting as a use of it."""
        path = self._root / place / name
        return path.read_bytes() if path.is_file() else None

    def remove(self, place: str) -> None:
        """Takes a published folder away: its marker first, so that nobody reads half of it."""
        path = self._root / place
        for marker in ("dataset.json", "manifest.json", "package.json"):
            (path / marker).unlink(missing_ok=True)
        if path.is_dir():
            shutil.rmtree(path)

    def _hold(self, relative: str) -> None:
        if self._root.is_dir():
            hold_until_exit(self.lock(relative))


class RemotePlaces:
    """Folders on an object store."""

    def __init__(self, files: Files, cache: Path) -> None:
        self.files = files
        self._cache = copies_of(files.url, cache)
        self._folder = self._cache.root

    def workspace_parent(self) -> Path:
        make_home_of(self._folder)
        make_private(self._folder.parent)  # what was fetched is for those alone who may read it there
        scratch = environment.path("SERIN_SCRATCH")
        return self._cache.workspace_parent() if scratch is None else make_private(scratch) / "work"

    def workspace_lock(self, name: str) -> Path:
        return self._folder / "in-use" / "work" / name

    def published(self, folder: str, *, marker: str) -> list[str]:  # noqa: ARG002
        return sorted(name.removesuffix(".json") for name in self.files.names(f"published/{folder}/"))

    def publish(
        self,
        folder: Path,
        place: str,
        *,
        marker: str,
        lasting: Collection[Path],  # noqa: ARG002  -- they are uploaded like the others
        same: bool,
        read_back: bool,
    ) -> Path:
        mine = list_files(folder)
        if self.files.read(marker_key(place)) is None:
            self.files.upload({f"{place}/{mine.attempt}/{name}": folder / name for name in mine.files})
            if read_back:
                self._read_back(place, mine, folder.parent)
            with suppress(ObjectExists):
                self.files.create(marker_key(place), mine.to_bytes())
                with writing_to(str(self._folder)):
                    return self._cache.adopt(place, mine, folder, hold=True)
        theirs = find_published(self.files, place)
        if theirs is not None and theirs.files == mine.files:
            with writing_to(str(self._folder)):
                return self._cache.adopt(place, theirs, folder, hold=True)
        if same:
            raise BundleBroken(path=place, reason="another process published other files there")
        found = self.fetch(place, marker=marker, hold=True)
        if found is None:
            raise StoreUnreachable(url=self.files.url, reason=f"{place} was removed while it was published")
        return found

    def _read_back(self, place: str, mine: Published, scratch: Path) -> None:
        """Raises BundleBroken unless the store has each file as it was sent."""
        for name, file in mine.files.items():
            path = scratch / "read-back"
            self.files.download({f"{place}/{mine.attempt}/{name}": path})
            if not is_as_listed(path, file):
                reason = f"{name} was changed on its way to {self.files.url}; nothing was published"
                raise BundleBroken(path=place, reason=reason)
            path.unlink()

    def fetch(self, place: str, *, marker: str, hold: bool) -> Path | None:  # noqa: ARG002
        with writing_to(str(self._folder)):
            self.workspace_parent()
            try:
                published = find_published(self.files, place)
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
                if find_published(self.files, place) is None:
                    return None  # removed in the meantime
                raise BundleBroken(path=place, reason=f"{error} is missing in {self.files.url}") from error

    def here(self, place: str, *, marker: str, hold: bool) -> Path | None:  # noqa: ARG002
        return self._cache.known(place, hold=hold)

    def marker_digest(self, place: str, *, marker: str) -> str | None:
        published = find_published(self.files, place)
        return None if published is None else published.files[marker].sha256

    def has_file(self, place: str, name: str, *, marker: str) -> bool | None:
        if (folder := self.here(place, marker=marker, hold=False)) is not None:
            return (folder / name).is_file()
        published = find_published(self.files, place)
        return None if published is None else name in published.files

    def read_file(self, place: str, name: str) -> bytes | None:
        marker = self.files.read(marker_key(place))
        if marker is None:
            return None
        attempt = Published.from_bytes(marker.content, path=place).attempt
        found = self.files.read(f"{place}/{attempt}/{name}")
        return None if found is None else found.content

    def remove(self, place: str) -> None:
        self.files.remove(marker_key(place))
        for key in self.files.keys(f"{place}/"):
            self.files.remove(key)
        self._cache.forget(place)
