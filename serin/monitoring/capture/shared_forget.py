"""Deletes rows from the records that hosts have uploaded: files that hold such rows are replaced by others without.

It may be cut short at any time and is done again then, with the same outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from serin.expressions import Expression, parse
from serin.formats.captures import Part, file_name, hour_began, parts_of_hour
from serin.formats.shared_captures import RECORDS, SharedFile, file_key, in_force, shared_files
from serin.monitoring.capture.forget import Deletion, going_rows
from serin.monitoring.capture.merge import rewrite
from serin.monitoring.capture.shared_read import Folder, SharedRecords, folders
from serin.monitoring.capture.shared_upload import create_once
from serin.spec.monitoring import CaptureSpec
from serin.store.file_list import listed

_TRIES: Final = 5  # a file may be replaced while its rows are looked at
_HOUR_S = 3600.0


def forget_shared(records: SharedRecords, model: str, where: str, hosts: Collection[str]) -> Deletion:
    """Deletes the rows for which `where` is true from the files that `hosts` wrote. A column that none of them has
    is null there. Raises ExpressionError when the expression cannot be computed."""
    expression = parse(where)
    listing = [file for file in records.listing(model) if file.writer.host in hosts]
    known: dict[str, pa.DataType] = {}
    rows = files = 0
    for host in hosts:
        records.files.abandon_uploads(0.0, f"{RECORDS}{model}/{host}/")  # of a process that was killed
    for folder, _ in folders(listing):
        for trial in range(_TRIES):
            try:
                found = _forget_in(records, folder, expression, known)
                break
            except FileNotFoundError:
                if trial == _TRIES - 1:
                    raise
        rows, files = rows + found.rows, files + found.files
    return Deletion(rows=rows, files=files)


def _forget_in(
    records: SharedRecords, folder: Folder, expression: Expression, known: dict[str, pa.DataType]
) -> Deletion:
    writer, version, hour = folder
    listing = shared_files(records.files.entries(f"{writer.prefix}{version}/{hour}/"))
    current = in_force(listing)
    for file in listing:
        if file not in current:  # a reader leaves it out, but it may hold such rows
            records.files.remove(file.key)
    if not current:
        return Deletion(rows=0, files=0)
    place = records.fetch(folder, current)
    rows = files = 0
    for part in parts_of_hour(place):
        known |= {field.name: field.type for field in pq.read_schema(part.path)}
        if set(expression.columns) - known.keys():
            continue  # no value of such a column was recorded here so far
        going, _ = going_rows(part.path, expression, known)
        if count := int(going.sum()):
            rows, files = rows + count, files + 1
            old = next(file for file in current if file.name == part.path.name)
            _replace(records, place, part, old, pa.array(~going))
    return Deletion(rows=rows, files=files)


def _replace(records: SharedRecords, place: Path, part: Part, old: SharedFile, keep: pa.Array) -> None:
    """The copy on this host is rewritten like a file of a home, and uploaded before the old file is removed."""
    rewrite(place, [part], keep)
    left = int(keep.true_count)
    if left:
        path, numbers = place / file_name(part.first, part.last, left), (part.first, part.last)
        content = listed(path)
        assert content.sha256 is not None, "a file that is there has a digest"
        key = file_key(old.writer, old.version, old.hour, numbers, left, content.sha256)
        create_once(records.files, key, path, content.size)
    records.files.remove(old.key)


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
