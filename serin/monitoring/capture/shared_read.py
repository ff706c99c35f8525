"""Reads the records of all hosts that share a store. Files are read through the copies on this host, which are compared
with their digests.

The copies of a home's records are laid out like a home, so that everything that reads a home reads them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from serin.formats.captures import captures_folder, hours_captured
from serin.formats.shared_captures import (
    COUNTERS,
    RECORDS,
    SharedFile,
    Writer,
    in_force,
    load_counters,
    read_sharing,
    shared_files,
)
from serin.monitoring.capture.read import captured_hour
from serin.store.cache import Cache
from serin.store.file_list import ListedFile, Published
from serin.store.objects import Files
from serin.store.store import Store

_TRIES: Final = 5  # a file may be replaced between the listing and the read
_COPIES: Final = "captures"

Folder = tuple[Writer, int, str]
"""The records of an hour of a version, from one home."""


class SharedRecords:
    """`home`: this host's own, whose files need not be fetched."""

    def __init__(self, files: Files, copies: Cache, home: Path) -> None:
        self.files, self._copies, self._home = files, copies, home

    @classmethod
    def of(cls, store: Store, home: Path) -> SharedRecords:
        return cls(store.shared_files(), store.copies(), home)

    def models(self) -> list[str]:
        return self.files.names(RECORDS)

    def listing(self, model: str, host: str | None = None) -> list[SharedFile]:
        """All files of a model, or those that one host wrote; also those that others replace."""
        return shared_files(self.files.entries(f"{RECORDS}{model}/{f'{host}/' if host else ''}"))

    def counters(self, model: str) -> dict[Writer, dict[str, Any]]:
        """What each home has counted."""
        found = {}
        for host in self.files.names(f"{RECORDS}{model}/"):
            for name in self.files.names(f"{RECORDS}{model}/{host}/"):
                writer = Writer(model=model, host=host, id=name)
                stored = self.files.read(writer.prefix + COUNTERS)
                found[writer] = {} if stored is None else load_counters(stored.content)
        return found

    def is_here(self, writer: Writer) -> bool:
        """Whether the records of `writer` are those of this home, and can be read there."""
        sharing = read_sharing(self._home, writer.model)
        return sharing is not None and sharing.writer == writer.id and not sharing.restored

    def readable_home(self, model: str) -> Path:
        """This home; an empty one if it was set back: what it has of the model is then read from the store alone, which
        has a part of it under another name."""
        sharing = read_sharing(self._home, model)
        return (
            self._copies.root / _COPIES / ".none" if sharing is not None and sharing.restored else self._home
        )

    def fetch(self, folder: Folder, files: Sequence[SharedFile]) -> Path:
        """The folder with copies of these files of an hour, and no others. FileNotFoundError: one was replaced since it
        was listed."""
        writer, version, hour = folder
        by_name = {file.name: file for file in files}
        content = {name: ListedFile(size=file.size, sha256=file.sha256) for name, file in by_name.items()}
        digest = hashlib.sha256("\n".join(sorted(file.key for file in files)).encode()).hexdigest()
        published = Published(attempt=digest[:16], by=writer.host, files=content)
        own = (
            captures_folder(self._home, writer.model) / str(version) / hour if self.is_here(writer) else None
        )

        def get(targets: Mapping[str, Path]) -> None:
            missing = {name: path for name, path in targets.items() if not _linked(own, name, path)}
            self.files.download({by_name[name].key: path for name, path in missing.items()})

        return self._copies.get(self._place(folder), published, get)

    def tables(self, folder: Folder, columns: Sequence[str] | None = None) -> pa.Table | None:
        """The rows of an hour of one home; None when there are none any more."""
        writer, version, hour = folder
        for trial in range(_TRIES):
            files = in_force(shared_files(self.files.entries(f"{writer.prefix}{version}/{hour}/")))
            if not files:
                return None
            try:
                self.fetch(folder, files)
                return captured_hour(self.home_of(writer), writer.model, version, hour, columns)
            except FileNotFoundError:
                if trial == _TRIES - 1:
                    raise
        return None

    def home_of(self, writer: Writer) -> Path:
        """The copies of a home, laid out like it."""
        return self._copies.root / _COPIES / writer.host / writer.id

    def drop_outdated(self, model: str, listing: Iterable[SharedFile]) -> bool:
        """Deletes copies of files that are not in `listing`: rows in them may have been deleted, or will be. Returns
        whether all are gone; one that is being read stays."""
        known = {folder: {file.name for file in files} for folder, files in folders(listing)}
        gone = True
        for path in (self._copies.root / _COPIES).glob(f"*/*/captures/{model}/*/*"):
            hosts = path.relative_to(self._copies.root / _COPIES).parts
            writer = Writer(model=model, host=hosts[0], id=hosts[1])
            names = known.get((writer, int(path.parent.name), path.name), set())
            if not names or any(file.name not in names for file in path.iterdir()):
                gone &= self._copies.forget(self._place((writer, int(path.parent.name), path.name)))
        return gone

    def _place(self, folder: Folder) -> str:
        writer, version, hour = folder
        return f"{_COPIES}/{writer.host}/{writer.id}/captures/{writer.model}/{version}/{hour}"


def folders(listing: Iterable[SharedFile]) -> Iterator[tuple[Folder, list[SharedFile]]]:
    """The files by hour, version and home, oldest hours first."""

    def place(file: SharedFile) -> tuple[str, int, str, str]:
        return file.hour, file.version, file.writer.host, file.writer.id

    for _, group in groupby(sorted(listing, key=place), key=place):
        files = list(group)
        yield files[0].folder, files


def elsewhere(records: SharedRecords, home: Path, listing: Iterable[SharedFile]) -> list[SharedFile]:
    """The files that this home does not have itself: those of other homes, and what was deleted here to make room."""
    kept: dict[Writer, bool] = {}
    found = []
    for file in listing:
        if kept.setdefault(file.writer, records.is_here(file.writer)) and file.hour in hours_captured(
            home, file.writer.model, file.version
        ):
            continue
        found.append(file)
    return found


def _linked(own: Path | None, name: str, target: Path) -> bool:
    """Takes the file from this host's records if it is there; its digest is compared like that of any other."""
    if own is None:
        return False
    with suppress(OSError):
        os.link(own / name, target)
        return True
    return False
