"""Merges the small parts of an hour into few files. Readers and followers see every row once at any time."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from serin.formats.captures import (
    SCRATCH,
    Part,
    bytes_in_memory,
    file_name,
    hour_began,
    hour_folders,
    hour_of,
    part_map,
    parts_of_hour,
    scratch_writer,
    writing,
)
from serin.machine.durable import sync
from serin.monitoring.capture.read import common_schema, fitted, part_tables

MOST_SMALL = 48  # parts of an hour that is not over yet
_OVER_S = 3600.0 + 600.0  # after its beginning an hour gets no more rows, unless the clock jumps
_LARGE_ROWS = 1 << 21
_LARGE_BYTES = 256 << 20  # in memory: what reads one file at a time never needs more
_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 32 << 20


def merge_parts(
    home: Path, model: str, now: float, *, most_small: int = MOST_SMALL, since: float | None = None
) -> int:
    """Merges parts of hours that are over, and of others that have many. Returns how many files were replaced. `since`:
    only hours from there on are looked at."""
    count, first = 0, "" if since is None else hour_of(since)
    for folder in hour_folders(home, model):
        if folder.name < first:
            continue
        least = 2 if now - hour_began(folder.name) > _OVER_S else most_small
        if len(parts_of_hour(folder)) < least:
            continue
        with writing(home, model):
            for run in list(_runs(parts_of_hour(folder))):
                if len(run) >= least:
                    rewrite(folder, run)
                    count += len(run)
    return count


def is_merged(parts: Sequence[Part]) -> bool:
    """Whether `merge_parts` leaves the files of an hour that is over as they are."""
    return all(len(run) < 2 for run in _runs(parts))


def rewrite(folder: Path, run: Sequence[Part], keep: pa.Array | None = None) -> None:
    """Replaces files that follow each other in `folder` by one, with the rows for which `keep` is true.

    The caller holds the lock.
    """
    rows = sum(part.rows for part in run) if keep is None else int(keep.true_count)
    path = folder / file_name(run[0].first, run[-1].last, rows)
    if rows:
        with merged(folder, run, keep) as scratch:
            scratch.replace(path)
        sync(folder)
    for part in run:
        if part.path != path:
            part.path.unlink(missing_ok=True)
    sync(folder)


@contextmanager
def merged(folder: Path, run: Sequence[Part], keep: pa.Array | None = None) -> Iterator[Path]:
    """An unfinished file in `folder` with the rows of parts for which `keep` is true. It is removed at the end of the
    block. Raises FileNotFoundError when a part was replaced."""
    schema = common_schema([pq.read_schema(part.path) for part in run])
    scratch = folder / f"{SCRATCH}{secrets.token_hex(8)}"
    try:
        with scratch_writer(scratch, schema, _numbers(run, keep)) as writer:
            for table in _tables(run, schema, keep):
                writer.write_table(table)
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


def tidy(home: Path, model: str) -> int:
    """Removes what a process that was killed left: unfinished files, and files that others replace. They are gone from
    the disk once this returns. Returns their number."""
    with writing(home, model) as folder:
        count = _remove(folder, folder.glob(f"{SCRATCH}*"))
        count += sum(map(_tidy_hour, hour_folders(home, model)))
    return count


def _tidy_hour(folder: Path) -> int:
    kept = {part.path for part in parts_of_hour(folder)}
    left = [path for path in folder.iterdir() if path.name.startswith(SCRATCH) or path.suffix == ".parquet"]
    count = _remove(folder, (path for path in left if path not in kept))
    with suppress(OSError):
        folder.rmdir()  # when it is empty
    return count


def _remove(folder: Path, paths: Iterable[Path]) -> int:
    going = list(paths)
    for path in going:
        path.unlink(missing_ok=True)  # an upload removes its own unfinished file
    if going:
        sync(folder)
    return len(going)


def _runs(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Small parts that follow each other, as many as fit into one file."""
    run, rows, size = list[Part](), 0, 0
    for part in parts if len(parts) > 1 else ():
        own = bytes_in_memory(part.path)
        if run and (rows + part.rows > _LARGE_ROWS or size + own > _LARGE_BYTES):
            yield run
            run, rows, size = [], 0, 0
        run.append(part)
        rows, size = rows + part.rows, size + own
    yield run or list(parts)


def _numbers(run: Sequence[Part], keep: pa.Array | None) -> list[tuple[int, int]]:
    """The parts in the new file and how many rows of each remain."""
    numbers = [each for part in run for each in part_map(part.path) if part.first <= each[0] <= part.last]
    if keep is None:
        return numbers
    ends = [0]
    for _, rows in numbers:
        ends.append(ends[-1] + rows)
    return [
        (number, int(keep[start:end].true_count if end > start else 0))
        for (number, _), (start, end) in zip(numbers, pairwise(ends), strict=True)
    ]


def _tables(run: Sequence[Part], schema: pa.Schema, keep: pa.Array | None) -> Iterator[pa.Table]:
    """The rows, about `_GROUP_ROWS` or `_GROUP_BYTES` at a time."""
    waiting: list[pa.Table] = []
    place = 0
    for part in run:
        tables = part_tables(part, schema.names)
        if tables is None:
            raise FileNotFoundError(part.path)
        for table in tables:
            rows = fitted(table, schema)
            waiting.append(rows if keep is None else rows.filter(keep[place : place + table.num_rows]))
            place += table.num_rows
            count, size = (sum(getattr(each, name) for each in waiting) for name in ("num_rows", "nbytes"))
            if count >= _GROUP_ROWS or size >= _GROUP_BYTES:
                yield pa.concat_tables(waiting).combine_chunks()
                waiting = []
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()
