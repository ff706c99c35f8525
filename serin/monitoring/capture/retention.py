"""The recorded hours of a model, in a home or in the store that hosts share, for what deletes records. Old ones are
deleted by age, and the oldest hours first when they take too much space."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from serin.formats.captures import (
    Part,
    file_name,
    hour_began,
    hour_folders,
    in_force,
    part_map,
    parts_of_hour,
    read_document,
    write_document,
    writing,
)
from serin.formats.shared_captures import RECORDS, SharedFile, read_sharing
from serin.monitoring.capture.all_hosts import Folder, SharedRecords, folders
from serin.monitoring.capture.merge import rewrite, tidy
from serin.monitoring.capture.read import column_types
from serin.spec.monitoring import CaptureSpec

log = logging.getLogger(__name__)

_HOUR_S = 3600.0

HomeHour = tuple[Path, int, str]


class HomeHours:
    """An hour is known by its folder, its version and its name."""

    def __init__(self, home: Path, model: str) -> None:
        self._home, self.model = home, model

    def sizes(self) -> dict[Any, int]:
        """The hours and their bytes, oldest first."""
        found = [(path, int(path.parent.name), path.name) for path in hour_folders(self._home, self.model)]
        return {hour: _size_of(hour[0]) for hour in sorted(found, key=itemgetter(2))}

    def columns(self) -> dict[str, pa.DataType]:
        """The columns that any record has."""
        return column_types(self._home, self.model)

    def tidy(self) -> int:
        """Removes what processes that were killed left. Returns the number of files."""
        return tidy(self._home, self.model)

    @contextmanager
    def opened(self, hour: HomeHour) -> Iterator[list[Part]]:
        """A block with the parts of an hour, which no other process of this host changes."""
        with writing(self._home, self.model):
            yield parts_of_hour(hour[0])

    def keep(self, hour: HomeHour, part: Part, rows: pa.Array) -> None:
        """Replaces a part by one with the rows for which `rows` is true."""
        rewrite(hour[0], [part], rows)

    def delete(self, hours: Collection[HomeHour], *, count_lost: bool = False) -> None:
        """Deletes hours. `count_lost`: rows that the store of several hosts does not have yet are counted as lost."""
        with writing(self._home, self.model) as folder:
            if count_lost:
                self._count_lost(folder, hours)
            for path, _, _ in hours:
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):
                    path.parent.rmdir()  # when it was the last of its version

    def _count_lost(self, folder: Path, hours: Iterable[HomeHour]) -> None:
        sharing = read_sharing(self._home, self.model)
        if sharing is None:
            return
        parts = [part for path, _, _ in hours for part in parts_of_hour(path) if part.last > sharing.last]
        lost = sum(rows for part in parts for number, rows in part_map(part.path) if number > sharing.last)
        if lost:
            document = read_document(self._home, self.model)
            write_document(folder, {**document, "lost_rows": document.get("lost_rows", 0) + lost})
            log.warning("%d rows of %s were deleted before they could be uploaded", lost, self.model)


class StoreHours:
    """The same of the files that `hosts` wrote; None: all. FileNotFoundError: one was replaced at the same moment."""

    def __init__(self, records: SharedRecords, model: str, hosts: Collection[str] | None = None) -> None:
        self._records, self.model, self._hosts = records, model, hosts
        self._listed: dict[Folder, list[SharedFile]] = {}

    def sizes(self) -> dict[Any, int]:
        listing = self._records.listing(self.model)
        chosen = [file for file in listing if self._hosts is None or file.writer.host in self._hosts]
        self._listed = dict(folders(chosen))
        return {hour: sum(file.size for file in files) for hour, files in self._listed.items()}

    def columns(self) -> dict[str, pa.DataType]:
        return {}  # it would take long to find out

    def tidy(self) -> int:
        for host in self._hosts or ():
            self._records.files.abandon_uploads(0.0, f"{RECORDS}{self.model}/{host}/")
        return 0

    @contextmanager
    def opened(self, hour: Folder) -> Iterator[list[Part]]:
        listing = self._records.hour(hour)
        current = self._listed[hour] = in_force(listing)
        for file in listing:
            if file not in current:  # a reader leaves it out, but it may hold rows that are to be deleted
                self._records.files.remove(file.key)
        yield parts_of_hour(self._records.fetch(hour, current)) if current else []

    def keep(self, hour: Folder, part: Part, rows: pa.Array) -> None:
        """The copy on this host is rewritten like a file of a home, and uploaded before the old file is removed."""
        (old,) = (file for file in self._listed[hour] if file.name == part.path.name)
        rewrite(part.path.parent, [part], rows)
        if left := int(rows.true_count):
            path = part.path.with_name(file_name(part.first, part.last, left))
            self._records.create(hour, (part.first, part.last), left, path)
        self._records.files.remove(old.key)

    def delete(self, hours: Collection[Folder], *, count_lost: bool = False) -> None:
        del count_lost  # the store has all of them
        for file in (file for hour in hours for file in self._listed[hour]):
            self._records.files.remove(file.key)


Hours = HomeHours | StoreHours


def expire(hours: Hours, limits: CaptureSpec, now: float | None, *, remove: bool = True) -> int:
    """Deletes hours that are older than `limits.keep` and then the oldest ones until the rest fits into
    `limits.max_size`. Returns the bytes. Several hosts may do it at the same time. `now`: None when the clock cannot be
    trusted; then nothing is too old."""
    sizes = hours.sizes()
    total = sum(sizes.values())
    oldest = float("-inf") if now is None else now - limits.keep
    going = []
    for hour, size in sizes.items():
        if hour_began(hour[2]) + _HOUR_S > oldest and total <= limits.max_size:
            break
        going.append(hour)
        total -= size
    if going and remove:
        hours.delete(going, count_lost=True)
    return sum(sizes[hour] for hour in going)


def delete_versions(hours: Hours, versions: Collection[int] | None = None, *, remove: bool = True) -> int:
    """Deletes all records of some versions, or of all. Returns their bytes."""
    sizes = hours.sizes()
    going = [hour for hour in sizes if versions is None or hour[1] in versions]
    if going and remove:
        hours.delete(going)
    return sum(sizes[hour] for hour in going)


def _size_of(folder: Path) -> int:
    size = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # merged or deleted since
                size += entry.stat().st_size
    return size
