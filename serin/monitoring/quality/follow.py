"""Follows new records and new labels of a model: every pair of a label and a recorded row is compared once.

    watch/quality/<model>/state.json     how far it has come, and what was counted
    watch/quality/<model>/waiting/       labels whose row is not recorded (yet), and all labels by request columns
    watch/quality/<model>/<version>/     labelled rows by day

A kill at any time loses nothing: what is not in state.json is done again, with the same result. The labels of recorded
rows that are deleted on request are deleted here, too.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.captures import Part
from serin.machine.documents import read_json
from serin.machine.durable import make_private, sync, write_whole
from serin.machine.typed_json import Document
from serin.monitoring.capture.read import Sources, alike, batches, read_part
from serin.monitoring.quality.keys import ID, ROW, Key, KeyIndex, captured_columns, captured_keys
from serin.monitoring.quality.labels import newest
from serin.monitoring.quality.scan import BATCH_ROWS, Found, Versions, Watched, search
from serin.monitoring.quality.store import (
    ARRIVED,
    KEY,
    JoinedRows,
    LabelFile,
    day_of,
    delete_old_labels,
    described,
    following,
    label_files,
    labels_folder,
    quality_folder,
    rewrite_labels,
    with_description,
    write_table,
)

T = TypeVar("T")
_FORGOTTEN, _STATE = "forgotten", "state.json"


@dataclass(slots=True, kw_only=True)
class QualityState(Document, form="serin.quality-state"):
    """`seen` and `labels`: the last part of each source of records, and the last file of labels, that were taken in.
    `recorded`: rows by version and day (UTC). `scores`: for the estimate, counts of scores by version and day: {place:
    count}. `evidence`: by version. `forgotten`: the last deletion on request that the counts take into account."""

    seen: dict[str, str] = field(default_factory=dict)
    labels: str = ""
    received: int = 0
    ambiguous: int = 0
    unclear: int = 0
    beyond: int = 0
    forgotten: str | None = None
    recorded: dict[str, dict[str, int]] = field(default_factory=dict)
    scores: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    evidence: dict[str, dict[str, Any]] = field(default_factory=dict)

    def count(self, found: Found) -> None:
        """Counts labels that cannot be used."""
        self.ambiguous += len(found.ambiguous)
        self.unclear += len(found.unclear)
        self.beyond += len(found.beyond)

    def count_again(self, forgotten: str | None) -> None:
        """Takes in all records again, after some were deleted. Labels that were joined stay so: each is evidence
        once."""
        self.seen, self.recorded, self.scores, self.forgotten = {}, {}, {}, forgotten

    def forget_before(self, moment: float) -> None:
        """Drops the counts of days that ended before this time."""
        first = day_of(moment)
        self.recorded = {version: _from(days, first) for version, days in self.recorded.items()}
        self.scores = {version: _from(days, first) for version, days in self.scores.items()}


def _from(days: dict[str, T], first: str) -> dict[str, T]:
    return {day: each for day, each in days.items() if day >= first}


def read_state(folder: Path) -> QualityState:
    """The state; that of a new model when there is none. Raises FileBroken when it cannot be read."""
    advice = "restore it, or move it away: the quality of this model is then measured again from its records"
    return read_json(folder / _STATE, QualityState.from_json, advice=advice) or QualityState()


def write_state(folder: Path, state: QualityState) -> None:
    """Writes the state into a folder that `following` has made."""
    write_whole(folder / _STATE, state.dump())


Rows = Callable[[Watched, pa.Table, QualityState], None]
"""What else is counted: gets new recorded rows, or rows that have just got their first label."""


def last_forgotten(folder: Path) -> str | None:
    """Changes whenever rows or labels are deleted on request."""
    try:
        return (folder / _FORGOTTEN).read_text()
    except FileNotFoundError:
        return None


def mark_forgotten(folder: Path) -> None:
    """Makes followers begin again with what is left."""
    write_whole(folder / _FORGOTTEN, secrets.token_hex(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    recorded: Rows
    labelled: Rows


class Follower:
    """One model. `advance` does one step of its work; `changed` says whether labels or records were added since."""

    def __init__(self, home: Path, model: str, versions: Versions, hooks: Hooks) -> None:
        """`home`: with the labels."""
        self._home, self._model, self._versions, self._hooks = home, model, versions, hooks
        self._folder = quality_folder(home, model)
        self.joined = JoinedRows(self._folder)
        self.state = read_state(self._folder)
        self._sources: Sources = {}
        self._index = KeyIndex()
        self._work: Iterator[None] | None = None

    def advance(self, sources: Sources) -> bool:
        """Does a bounded piece of work. Returns whether there is more to do. What was begun before rows were
        forgotten begins again without them, and the rows that are left are counted again; so are all when they are read
        from other sources."""
        self._sources = sources
        with following(self._home, self._model) as folder:
            forgotten = last_forgotten(folder)
            if forgotten != self.state.forgotten or not self.state.seen.keys() <= sources.keys():
                self._work = None
                self.state.count_again(forgotten)
            return self._advance()

    def _advance(self) -> bool:
        if self._work is None:
            self._work = self._steps()
        try:
            next(self._work)
        except StopIteration:
            self._work = None
            return False
        except BaseException:
            self._work = None
            raise
        return True

    def delete_before(self, moment: float) -> None:
        """Deletes what is older than records are kept."""
        with following(self._home, self._model):
            delete_old_labels(self._home, self._model, moment)
            self.joined.delete_before(moment)
            for file in waiting_labels(self._folder):
                table = file.read()
                kept = table.filter(pa.array(np.asarray(table.column(ARRIVED)) >= moment * 1e6))
                if kept.num_rows < table.num_rows:
                    self._keep_waiting(file, kept)
            self.state.forget_before(moment)

    def waiting(self) -> int:
        """How many labels are about a request that is not recorded."""
        return sum(file.rows for file in waiting_labels(self._folder) if file.key.of_request)

    def _steps(self) -> Iterator[None]:
        yield from self._new_records()
        for files in _alike(label_files(self._home, self._model, after=self.state.labels)):
            yield from self._new_labels(files)

    def _new_labels(self, files: list[LabelFile]) -> Iterator[None]:
        """Joins files of labels with the same kind of key, in one search."""
        file, found = files[-1], Found()
        labels = newest(pa.concat_tables([each.read() for each in files]))
        for found in search(self._sources, self._model, file, labels, self._versions, self._index):  # noqa: B007
            yield
        self._add(found)
        self.state.count(found)
        self.state.received += sum(each.rows for each in files)
        left = _undecided(file, labels, found)
        if left.num_rows:
            self._keep_waiting(file, left, add=True)
        self.state.labels = file.sequence
        write_state(self._folder, self.state)

    def _new_records(self) -> Iterator[None]:
        for name, source in self._sources.items():
            for found in batches(source, self._model, after=self.state.seen.get(name)):
                tables = self._tables(found)
                if tables is None:
                    break  # merged just now: the next look finds its rows
                self._take(tables, name, found[-1])
                yield

    def _tables(self, found: list[Part]) -> dict[int, list[pa.Table]] | None:
        """The rows of parts by version; None when one is gone."""
        tables: dict[int, list[pa.Table]] = {}
        for part in found:
            if self._versions(part.version) is not None:
                table = self._read(part)
                if table is None:
                    return None
                tables.setdefault(part.version, []).append(table)
        return tables

    def _read(self, part: Part) -> pa.Table | None:
        watched = self._versions(part.version)
        assert watched is not None
        keys = [captured_columns(file.key, watched.schema) or () for file in waiting_labels(self._folder)]
        columns = dict.fromkeys([*watched.kept, *(name for key in keys for name in key)])
        return read_part(part, list(columns))

    def _take(self, tables: dict[int, list[pa.Table]], source: str, last: Part) -> None:
        """Counts new records and joins them with the labels that wait for them."""
        for version, each in tables.items():
            watched = self._versions(version)
            assert watched is not None
            rows = alike(each)
            self._hooks.recorded(watched, rows, self.state)
            for file in waiting_labels(self._folder):
                columns = captured_columns(file.key, watched.schema)
                if columns is None or watched.data.target.expression != file.expression:
                    continue
                labels, found = file.read(), Found()
                found.add(labels, rows, file.key, watched)
                found.settle()
                self._add(found)
                self.state.count(found)
                left = _undecided(file, labels, found)
                if left.num_rows < labels.num_rows:
                    self._keep_waiting(file, left)
        self.state.seen[source] = last.sequence
        write_state(self._folder, self.state)

    def _add(self, found: Found) -> None:
        for version, tables in found.rows.items():
            rows = pa.concat_tables(tables, promote_options="permissive")
            watched = self._versions(version)
            if watched is None or not rows.num_rows:
                continue
            fresh = self.joined.add(version, rows)
            if fresh.num_rows:
                order = [
                    (ARRIVED, "ascending"),
                    ("_t", "ascending"),
                    ("_id", "ascending"),
                    ("_row", "ascending"),
                ]
                self._hooks.labelled(watched, fresh.sort_by(order), self.state)

    def _keep_waiting(self, like: LabelFile, labels: pa.Table, *, add: bool = False) -> None:
        """Replaces the labels that wait by the same key, or adds to them."""
        folder = make_private(self._folder / "waiting")
        name = hashlib.sha256(f"{like.key}\n{like.expression}".encode()).hexdigest()[:16]
        path = folder / f"{name}.parquet"
        if add and path.is_file():
            labels = newest(pa.concat_tables([described(path).read(), labels]))
        if labels.num_rows:
            write_table(path, with_description(labels, like))
        else:
            path.unlink(missing_ok=True)


def _undecided(file: LabelFile, labels: pa.Table, found: Found) -> pa.Table:
    """The labels that a later record may be about: by request columns, all of them."""
    left = np.ones(labels.num_rows, bool)
    left[list(found.decided if file.key.of_request else ())] = False
    return labels.filter(pa.array(left))


def _alike(files: list[LabelFile]) -> Iterator[list[LabelFile]]:
    """Files that follow each other and can be joined together, up to a number of labels."""
    group: list[LabelFile] = []
    for file in files:
        other = group and (file.key, file.expression) != (group[0].key, group[0].expression)
        if group and (other or sum(each.rows for each in group) + file.rows > BATCH_ROWS):
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def waiting_labels(folder: Path) -> list[LabelFile]:
    """The labels whose row is not recorded (yet), and all labels by request columns."""
    return [described(path) for path in sorted((folder / "waiting").glob("*.parquet"))]


def forget_rows(home: Path, model: str, rows: Mapping[int, pa.Table], versions: Versions) -> int:
    """Deletes the labels of recorded rows (by version, with all their columns), wherever labels are kept. Returns how
    many labels that arrived were deleted."""
    with following(home, model) as folder:
        deleted = _forget(home, model, folder, rows, versions)
        mark_forgotten(folder)
    return deleted


def count_again(home: Path, model: str) -> None:
    """Has recorded rows counted again, and removes what killed processes left of labels. Call it once deleted rows are
    not in the records any more."""
    with following(home, model) as folder:
        _tidy(home, model, folder)
        mark_forgotten(folder)


def _tidy(home: Path, model: str, folder: Path) -> None:
    """Removes unfinished files of processes that were killed: only the holder of the lock writes such tables."""
    unfinished = ".*.parquet.*"  # of `write_table`
    for path in [*labels_folder(home, model).glob(unfinished), *folder.rglob(unfinished)]:
        path.unlink()
        sync(path.parent)


def _forget(home: Path, model: str, folder: Path, rows: Mapping[int, pa.Table], versions: Versions) -> int:
    def keep(file: LabelFile, labels: pa.Table) -> npt.NDArray[np.bool_]:
        gone = pa.concat_arrays([pa.array([], pa.string()), *_keys(file.key, rows, versions)])
        return ~np.asarray(pc.is_in(labels.column(KEY), value_set=gone))

    deleted = rewrite_labels(label_files(home, model), keep)
    rewrite_labels(waiting_labels(folder), keep)
    pairs = pa.concat_arrays([pa.array([], pa.string()), *map(_pairs, rows.values())])
    JoinedRows(folder).filter(lambda table: ~np.asarray(pc.is_in(_pairs(table), value_set=pairs)))
    return deleted


def _keys(key: Key, rows: Mapping[int, pa.Table], versions: Versions) -> list[pa.Array]:
    found = []
    for version, table in rows.items():
        watched = versions(version)
        columns = None if watched is None else captured_columns(key, watched.schema)
        if watched is not None and columns is not None and set(columns) <= set(table.column_names):
            found.append(captured_keys(table, key, watched.schema).drop_null())
    return found


def _pairs(rows: pa.Table) -> pa.Array:
    ids, numbers = rows.column(ID).cast(pa.string()), rows.column(ROW).cast(pa.string())
    return pc.binary_join_element_wise(ids, numbers, "\x1f").combine_chunks()
