"""The records of this home together with those of all hosts that share a store: counted, the newest, or all of a
period."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from serin.formats.captures import hour_began, versions_captured
from serin.formats.shared_captures import SharedFile, in_force
from serin.monitoring.capture.counters import CapturesView, VersionCaptures, captures_view, read_captures
from serin.monitoring.capture.forget import column_types
from serin.monitoring.capture.read import alike, between, captured_tables, common_schema, fitted, newest
from serin.monitoring.capture.shared_read import Folder, SharedRecords, elsewhere, folders

_HOUR_S = 3600.0
_ORDER = [("_t", "ascending"), ("_id", "ascending"), ("_row", "ascending")]


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
        kept: dict[str, list[SharedFile]] = defaultdict(list)
        for _, files in self._away:
            for file in files:
                kept[file.writer.prefix].append(file)
        found = [] if here is None else [replace(here, host=self._host)]
        for writer, document in self._records.counters(self._model).items():
            if not self._records.is_here(writer):
                versions = _kept(kept.get(writer.prefix, []))
                found.append(captures_view(self._model, document, versions, host=writer.host))
        return sorted(found, key=lambda view: view.host or "")

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


def _kept(files: list[SharedFile]) -> list[VersionCaptures]:
    by_version: dict[int, list[SharedFile]] = defaultdict(list)
    for file in files:
        by_version[file.version].append(file)
    return [
        VersionCaptures(
            version=version,
            hours=len({file.hour for file in own}),
            rows=sum(file.rows for file in own),
            bytes=sum(file.size for file in own),
            first_hour=min(file.hour for file in own),
            last_hour=max(file.hour for file in own),
        )
        for version, own in sorted(by_version.items())
    ]
