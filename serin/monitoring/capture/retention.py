"""Deletes old records, of a home and of the store that hosts share: by age, and the oldest hours first when they take
too much space."""

from __future__ import annotations

import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serin.formats.captures import (
    captures_folder,
    hour_began,
    hour_folders,
    part_map,
    parts_of_hour,
    read_document,
    write_document,
    writing,
)
from serin.formats.shared_captures import RECORDS, SharedFile, read_sharing
from serin.monitoring.capture.shared_read import SharedRecords
from serin.spec.monitoring import CaptureSpec

log = logging.getLogger(__name__)

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hour:
    path: Path
    began: float
    bytes: int


def expire(home: Path, model: str, limits: CaptureSpec, now: float | None, *, remove: bool = True) -> int:
    """Deletes hours that are older than `limits.keep` and then the oldest ones until the rest fits into
    `limits.max_size`. Returns the bytes. `now`: None when the clock cannot be trusted; then nothing is too old."""
    hours = _hours(home, model)
    total = sum(hour.bytes for hour in hours)
    oldest = float("-inf") if now is None else now - limits.keep
    going = []
    for hour in hours:
        if hour.began + _HOUR_S <= oldest or total > limits.max_size:
            going.append(hour)
            total -= hour.bytes
    if going and remove:
        with writing(home, model) as folder:
            _count_lost(home, model, folder, going)
            for hour in going:
                shutil.rmtree(hour.path, ignore_errors=True)
    return sum(hour.bytes for hour in going)


def _count_lost(home: Path, model: str, folder: Path, going: Sequence[_Hour]) -> None:
    """Counts the rows that are deleted before the store of several hosts has them."""
    sharing = read_sharing(home, model)
    if sharing is None:
        return
    parts = [part for hour in going for part in parts_of_hour(hour.path) if part.last > sharing.last]
    lost = sum(rows for part in parts for number, rows in part_map(part.path) if number > sharing.last)
    if lost:
        document = read_document(home, model)
        write_document(folder, {**document, "lost_rows": document.get("lost_rows", 0) + lost})
        log.warning("%d rows of %s were deleted before they could be uploaded", lost, model)


def delete_version(home: Path, model: str, version: int) -> int:
    """Deletes all records of a version and returns their bytes."""
    folder = captures_folder(home, model) / str(version)
    if not folder.is_dir():
        return 0
    with writing(home, model):
        size = _size(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return size


def _hours(home: Path, model: str) -> list[_Hour]:
    """All hours of all versions, oldest first."""
    folders = hour_folders(home, model)
    hours = [_Hour(path=path, began=hour_began(path.name), bytes=_size(path)) for path in folders]
    return sorted(hours, key=lambda hour: hour.began)


def _size(folder: Path) -> int:
    """The bytes of the files in an hour's folder, or of all hours of a version."""
    size = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # merged or deleted since
                size += _size(Path(entry.path)) if entry.is_dir() else entry.stat().st_size
    return size


def expire_shared(
    records: SharedRecords, model: str, limits: CaptureSpec, now: float | None, *, remove: bool = True
) -> int:
    """Deletes hours that are older than `limits.keep`, then the oldest ones of all hosts until the rest fits into
    `limits.max_size`. Returns the bytes. Several hosts may do it at the same time. `now`: None when the clock cannot be
    trusted; then nothing is too old."""
    hours: dict[str, list[SharedFile]] = defaultdict(list)
    for file in records.listing(model):
        hours[file.hour].append(file)
    total = sum(file.size for files in hours.values() for file in files)
    oldest = float("-inf") if now is None else now - limits.keep
    gone = 0
    for hour, files in sorted(hours.items()):
        if hour_began(hour) + _HOUR_S > oldest and total <= limits.max_size:
            break
        size = sum(file.size for file in files)
        total, gone = total - size, gone + size
        for file in files if remove else ():
            records.files.remove(file.key)
    return gone


def delete_shared(records: SharedRecords, model: str, versions: Collection[int], *, whole: bool) -> int:
    """Deletes the records of versions, or of the `whole` model, from the store. Returns their bytes."""
    going = [file for file in records.listing(model) if whole or file.version in versions]
    for file in going:
        records.files.remove(file.key)
    if whole:
        for key in records.files.keys(f"{RECORDS}{model}/"):
            records.files.remove(key)
    records.drop_outdated(model, [])
    return sum(file.size for file in going)
