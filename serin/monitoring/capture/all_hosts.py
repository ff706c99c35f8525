"""Reads and changes the records in the store that several hosts share. Files are read through the copies on this host,
which are compared with their digests and laid out like a home, so that everything that reads a home reads them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from serin.errors import ObjectExists, StoreUnreachable
from serin.formats.captures import (
    captures_folder,
    hour_folders,
    in_force,
    readable_document,
    versions_captured,
)
from serin.formats.shared_captures import (
    COUNTERS,
    RECORDS,
    SharedFile,
    Writer,
    file_key,
    load_counters,
    read_sharing,
    shared_files,
)
from serin.monitoring.capture.counters import CapturesView, captures_view, read_captures, versions_kept
from serin.monitoring.capture.read import (
    alike,
    column_types,
    common_schema,
    fitted,
    hour_tables,
    newest,
    overlaps,
    until_found,
)
from serin.store.cache import Cache
from serin.store.file_list import ListedFile, Published, listed
from serin.store.objects import Files
from serin.store.store import Store

_READ: Final = "captures"  # where the copies are that any command reads ...
FOLLOWED: Final = "followed"  # ... and those that drift and live quality follow
_ORDER = [("_t", "ascending"), ("_id", "ascending"), ("_row", "ascending")]

Folder = tuple[Writer, int, str]
"""The records of an hour of a version, from one home."""


class SharedRecords:
    """`home`: this host's own, whose files need not be fetched. `place`: of the copies; a watcher also drops those that
    commands have left."""

    def __init__(self, files: Files, copies: Cache, home: Path, place: str = _READ) -> None:
        self.files, self._copies, self._home, self._place = files, copies, home, place

    @classmethod
    def of(cls, store: Store, home: Path, place: str = _READ) -> SharedRecords:
        return cls(store.shared_files(), store.copies(), home, place)

    def models(self) -> list[str]:
        return self.files.names(RECORDS)

    def listing(self, model: str) -> list[SharedFile]:
        """All files of a model, also those that others replace."""
        return shared_files(self.files.entries(f"{RECORDS}{model}/"))

    def hour(self, folder: Folder) -> list[SharedFile]:
        """All files of an hour of one home."""
        writer, version, hour = folder
        return shared_files(self.files.entries(f"{writer.prefix}{version}/{hour}/"))

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
        return self._root / ".none" if sharing is not None and sharing.restored else self._home

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

        return self._copies.get(self._place_of(folder), published, get, shrink=False)

    def create(self, folder: Folder, numbers: tuple[int, int], rows: int, path: Path) -> str:
        """Uploads a file; returns its key, which names its content: one that is there already is the same."""
        content = listed(path)
        assert content.sha256 is not None, "a file that is there has a digest"
        key = file_key(*folder, numbers, rows, content.sha256)
        try:
            self.files.create_file(key, path)
        except ObjectExists:
            if not any(entry.key == key and entry.size == content.size for entry in self.files.entries(key)):
                reason = f"{key} is being written by another process"
                raise StoreUnreachable(url=self.files.url, reason=reason) from None
        return key

    def copy(self, folder: Folder) -> Path | None:
        """The folder with copies of an hour of one home; None when it has no rows any more."""

        def fetched() -> Path | None:
            files = in_force(self.hour(folder))
            return self.fetch(folder, files) if files else None

        return until_found(fetched)

    def home_of(self, writer: Writer) -> Path:
        """The copies of a home, laid out like it."""
        return self._root / writer.host / writer.id

    def drop_outdated(self, model: str, listing: Iterable[SharedFile]) -> bool:
        """Deletes copies of files that are not in `listing`: rows in them may have been deleted, or will be. Returns
        whether all are gone; one that is being read stays."""
        known = {folder: {file.name for file in files} for folder, files in folders(listing)}
        gone, root = True, self._copies.root
        for path in (
            path for place in {_READ, self._place} for path in root.glob(f"{place}/*/*/captures/{model}/*/*")
        ):
            _, host, name = path.relative_to(root).parts[:3]
            names = known.get(
                (Writer(model=model, host=host, id=name), int(path.parent.name), path.name), set()
            )
            if not names or any(file.name not in names for file in path.iterdir()):
                gone &= self._copies.forget(path.relative_to(root).as_posix())
        self._copies.shrink()
        return gone

    @property
    def _root(self) -> Path:
        return self._copies.root / self._place

    def _place_of(self, folder: Folder) -> str:
        writer, version, hour = folder
        return f"{self._place}/{writer.host}/{writer.id}/captures/{writer.model}/{version}/{hour}"


def folders(listing: Iterable[SharedFile]) -> Iterator[tuple[Folder, list[SharedFile]]]:
    """The files by hour, version and home, oldest hours first."""

    def place(file: SharedFile) -> tuple[str, int, str, str]:
        return file.hour, file.version, file.writer.host, file.writer.id

    for _, group in groupby(sorted(listing, key=place), key=place):
        files = list(group)
        yield files[0].folder, files


def _linked(own: Path | None, name: str, target: Path) -> bool:
    """Takes the file from this host's records if it is there; its digest is compared like that of any other."""
    if own is None:
        return False
    with suppress(OSError):
        os.link(own / name, target)
        return True
    return False


class AllHosts:
    """A model's records on all hosts: counted, the newest, or all of a period. What this home has is read here,
    everything else from the store. `records`: None where hosts share nothing of this model."""

    def __init__(self, home: Path, records: SharedRecords | None, host: str, model: str) -> None:
        self._home, self._records, self._host, self._model = home, records, host, model
        self._away: list[tuple[Folder, list[SharedFile]]] = []
        if records is not None:
            self._home = records.readable_home(model)
            listing = records.listing(model)
            records.drop_outdated(model, listing)
            mine = {writer for writer in {file.writer for file in listing} if records.is_here(writer)}
            # This home may have deleted an hour to make room.
            kept = {(int(path.parent.name), path.name) for path in hour_folders(self._home, model)}
            self._away = [
                (folder, in_force(files))
                for folder, files in folders(listing)
                if folder[0] not in mine or folder[1:] not in kept
            ]

    @property
    def versions(self) -> list[int]:
        return sorted({*versions_captured(self._home, self._model), *(f[1] for f, _ in self._away)})

    def views(self) -> list[CapturesView]:
        """One for each home that has records, by host."""
        here = read_captures(self._home, self._model)
        if self._records is None:
            return [] if here is None else [here]
        files = [file for _, some in self._away for file in some]
        views = [] if here is None else [replace(here, host=self._host)]
        for writer, document in self._records.counters(self._model).items():
            if not self._records.is_here(writer):
                theirs = [file for file in files if file.writer.prefix == writer.prefix]
                versions = versions_kept((file.version, file.hour, file.rows, file.size) for file in theirs)
                views.append(captures_view(self._model, document, versions, host=writer.host))
        return sorted(views, key=lambda view: view.host or "")

    def newest(self, rows: int, *, version: int | None = None) -> pa.Table:
        """The last `rows` rows: of one home in the order of writing, of several by their time of arrival."""
        found, left, last = [newest(self._home, self._model, rows, version=version)], rows, ""
        if not self._away:
            return found[0]
        for folder, files in reversed(self._away):
            if version is not None and folder[1] != version:
                continue
            if left <= 0 and folder[2] != last:  # of the last hour all hosts count
                break
            found += self._hour(folder)
            left, last = left - sum(file.rows for file in files), folder[2]
        table = alike(found).sort_by(_ORDER)
        return table.slice(max(0, table.num_rows - rows))

    def tables(
        self, *, version: int | None = None, since: float | None = None, until: float | None = None
    ) -> Iterator[pa.Table]:
        """All rows that arrived from `since` to before `until`, a file at a time, with the same columns."""
        schema = common_schema([table.schema for table in self._tables(version, since, until)])
        for table in self._tables(version, since, until):
            yield fitted(table, schema)

    def columns(self) -> dict[str, pa.DataType]:
        """The columns that any host has recorded: of each version as its newest file says."""
        newest_of = {folder[1]: folder for folder, _ in self._away}
        tables = (table for folder in newest_of.values() for table in self._hour(folder))
        types = {field.name: field.type for table in tables for field in table.schema}
        return {**types, **column_types(self._home, self._model)}

    def first_hour(self, version: int | None = None) -> str | None:
        """The oldest recorded hour, of all versions or one."""
        versions = None if version is None else [version]
        hours = [folder.name for folder in hour_folders(self._home, self._model, versions)]
        return min([*hours, *(f[2] for f, _ in self._away if version in (None, f[1]))], default=None)

    def places(
        self,
        *,
        version: int | None = None,
        since: float | None = None,
        until: float | None = None,
        newest_first: bool = False,
    ) -> Iterator[Path]:
        """The folders on this host with the records of an hour each; those of others are fetched when it is their
        turn."""
        readable_document(self._home, self._model)
        versions = None if version is None else [version]
        here = hour_folders(self._home, self._model, versions)
        found: list[tuple[str, Path | Folder]] = [(path.name, path) for path in here]
        found += [(folder[2], folder) for folder, _ in self._away if version in (None, folder[1])]
        if newest_first:
            found.sort(key=itemgetter(0), reverse=True)
        for hour, place in found:
            if overlaps(hour, since, until):
                path = place if isinstance(place, Path) else self._copy(place)
                if path is not None:
                    yield path

    def _tables(self, version: int | None, since: float | None, until: float | None) -> Iterator[pa.Table]:
        for place in self.places(version=version, since=since, until=until):
            yield from (table for table in hour_tables(place, since, until) if table.num_rows)

    def _hour(self, folder: Folder) -> Iterator[pa.Table]:
        if place := self._copy(folder):
            yield from (table for table in hour_tables(place) if table.num_rows)

    def _copy(self, folder: Folder) -> Path | None:
        assert self._records is not None, "folders elsewhere are in the store"
        return self._records.copy(folder)
