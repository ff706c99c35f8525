"""Copies the records of all hosts to this one, in the form of a home: for what follows records row by row, such as
drift and live quality.

Rows, and how far each host's were copied, are committed in one step: each row is there once, wherever it is killed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from serin.expressions import parse
from serin.formats.captures import (
    Part,
    bytes_in_memory,
    captures_folder,
    commit,
    last_number,
    read_document,
    write_document,
    writing,
)
from serin.formats.shared_captures import BORN, SharedFile, Writer, combined_home, in_force
from serin.machine.private import make_private
from serin.monitoring.capture.forget import matches
from serin.monitoring.capture.read import alike, parts, read_part
from serin.monitoring.capture.shared_read import Folder, SharedRecords, folders
from serin.monitoring.capture.shared_upload import up_to

_BATCH_ROWS, _BATCH_BYTES = 1 << 19, 256 << 20  # of a home, in one call
_TAKEN: Final = "taken"  # in counters.json: the last part of each home that was copied

Hidden = Mapping[str, Sequence[str]]
"""By host, conditions of rows that it was asked to delete and has not deleted yet. Read before the records are."""


def combine(home: Path, records: SharedRecords, model: str, hidden: Hidden) -> int:
    """Copies what is new; returns how many rows. A call takes a bounded number: the next one takes the rest."""
    make_private(combined_home(home))
    with writing(combined_home(home), model) as folder:
        document = read_document(combined_home(home), model)
        # Numbers continue after those of copies that were lost: what follows them remembers its place.
        document["last"] = last_number(combined_home(home), model) or int(time.time())
        document.setdefault(BORN, document["last"])
        taken, tables = dict(document.get(_TAKEN, {})), dict[int, list[pa.Table]]()
        counters, listing = records.counters(model), None
        for writer, counted in counters.items():
            seen = int(taken.get(writer.id, 0))
            source = home
            if not records.is_here(writer):
                listing = listing or list(folders(records.listing(model)))
                source = _fetched(records, writer, listing, counted, seen)
            found = _batch(parts(source, model, after=str(seen)), seen)
            read = [read_part(part) for part in found]
            if not found or any(
                table is None for table in read
            ):  # merged just now: the next call finds its rows
                continue
            taken[writer.id] = found[-1].last
            for part, table in zip(found, read, strict=True):
                rows = _without(table, hidden.get(writer.host, ()))
                tables.setdefault(part.version, []).append(rows)
        if taken == document.get(_TAKEN):
            return 0
        whole = [(version, alike(some)) for version, some in sorted(tables.items())]
        commit(folder, {**document, _TAKEN: taken}, [pair for pair in whole if pair[1].num_rows])
    return sum(table.num_rows for _, table in whole)


def _fetched(
    records: SharedRecords,
    writer: Writer,
    listing: Sequence[tuple[Folder, list[SharedFile]]],
    counted: Mapping[str, Any],
    seen: int,
) -> Path:
    """Copies the files with new rows of another home; returns the home that they make. `counted` was read before
    `listing`, so all parts up to its last one are there."""
    copies = records.home_of(writer)
    for folder, files in listing:
        if folder[0] == writer and any(file.last > seen for file in files):
            records.fetch(folder, in_force(files))
    make_private(captures_folder(copies, writer.model))
    write_document(captures_folder(copies, writer.model), {"last": int(counted.get("last", 0))})
    return copies


def _batch(found: list[Part], seen: int) -> list[Part]:
    """The first of the parts, as many as are copied at once and can be marked as copied by one number."""
    limits, rows, size = list[int](), 0, 0
    for part in found:
        rows, size = rows + part.rows, size + bytes_in_memory(part.path)
        if rows > _BATCH_ROWS or size > _BATCH_BYTES:
            break
        limits.append(part.last)
    own = up_to(limits[-1], found, seen) if limits else []
    return own or next((some for part in found if (some := up_to(part.last, found, seen))), found)


def _without(table: pa.Table, conditions: Sequence[str]) -> pa.Table:
    for where in conditions:
        expression = parse(where)
        if set(expression.columns) <= set(table.column_names):
            table = table.filter(pa.array(np.logical_not(matches(expression, table))))
    return table
