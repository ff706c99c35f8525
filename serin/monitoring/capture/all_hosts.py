"""The records of this home together with those of all hosts that share a store: counted, the newest, all of a period,
or copied to this host in the form of a home, for what follows records row by row, such as drift and live quality."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    hour_began,
    last_number,
    read_document,
    versions_captured,
    write_document,
    writing,
)
from serin.formats.shared_captures import BORN, SharedFile, Writer, combined_home, in_force
from serin.machine.durable import make_private
from serin.monitoring.capture.counters import CapturesView, captures_view, read_captures, versions_kept
from serin.monitoring.capture.forget import column_types, matches
from serin.monitoring.capture.read import (
    alike,
    between,
    captured_tables,
    common_schema,
    fitted,
    newest,
    parts,
    read_part,
)
from serin.monitoring.capture.shared_read import Folder, SharedRecords, elsewhere, folders
from serin.monitoring.capture.shared_upload import up_to

_HOUR_S = 3600.0
_BATCH_ROWS, _BATCH_BYTES = 1 << 19, 256 << 20  # of a home, in one call of `combine`
_TAKEN: Final = "taken"  # in counters.json: the last part of each home that was copied
_ORDER = [("_t", "ascending"), ("_id", "ascending"), ("_row", "ascending")]

Hidden = Mapping[str, Sequence[str]]
"""By host, conditions of rows that it was asked to delete and has not deleted yet. Read before the records are."""


class AllHosts:
    """A model's records. What this home has is read here, everything else from the store. `records`: None where hosts
    share nothing of this model."""

    def __init__(self, home: Path, records: SharedRecords | None, host: str, model: str) -> None:
        self._home, self._records, self._host, self._model = home, records, host, model
        self._away: list[tuple[Folder, list[SharedFile]]] = []
        if records is not None:
            self._home = home = records.readable_home(model)
            listing = records.listing(model)
            records.drop_outdated(model, listing)
            away = folders(elsewhere(records, home, listing))
            self._away = [(folder, in_force(files)) for folder, files in away]

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
            table = self._fetched(folder)
            if table is not None:
                found.append(table)
            left, last = left - sum(file.rows for file in files), folder[2]
        table = alike(found).sort_by(_ORDER)
        return table.slice(max(0, table.num_rows - rows))

    def tables(
        self, *, version: int | None = None, since: float | None = None, until: float | None = None
    ) -> Iterator[pa.Table]:
        """All rows that arrived from `since` to before `until`, an hour of a host at a time, with the same columns."""
        schemas = [table.schema for table in self._tables(version, since, until)]
        schema = common_schema(schemas)
        for table in self._tables(version, since, until):
            yield fitted(table, schema)

    def columns(self) -> dict[str, pa.DataType]:
        """The columns that any host has recorded: of each version as its newest file says."""
        newest_of: dict[int, Folder] = {folder[1]: folder for folder, _ in self._away}
        tables = [table for folder in newest_of.values() if (table := self._fetched(folder)) is not None]
        types = {field.name: field.type for table in tables for field in table.schema}
        return {**types, **column_types(self._home, self._model)}

    def _tables(self, version: int | None, since: float | None, until: float | None) -> Iterator[pa.Table]:
        versions = None if version is None else [version]
        yield from captured_tables(self._home, self._model, versions=versions, since=since, until=until)
        for folder, _ in self._away:
            began = hour_began(folder[2])
            if (version is not None and folder[1] != version) or (until is not None and began >= until):
                continue
            if since is not None and began + _HOUR_S <= since:
                continue
            table = self._fetched(folder)
            if table is not None and (rows := between(table, since, until)).num_rows:
                yield rows

    def _fetched(self, folder: Folder) -> pa.Table | None:
        assert self._records is not None, "folders elsewhere are in the store"
        return self._records.tables(folder)


def combine(home: Path, records: SharedRecords, model: str, hidden: Hidden) -> int:
    """Copies the records of all hosts to this one; returns how many rows were new. A call takes a bounded number: the
    next one takes the rest. Rows, and how far each host's were copied, are committed in one step: each row is there
    once, wherever it is killed."""
    make_private(combined_home(home))
    with writing(combined_home(home), model) as folder:
        document = read_document(combined_home(home), model)
        # Numbers continue after those of copies that were lost: what follows them remembers its place.
        document["last"] = last_number(combined_home(home), model) or int(time.time())
        document.setdefault(BORN, secrets.randbits(48))
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
            if not found or any(table is None for table in read):
                continue  # merged just now: the next call finds its rows
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
