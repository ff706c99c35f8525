"""Follows new records and new labels of a model: every pair of a label and a recorded row is compared once.

    watch/quality/<model>/state.json     how far it has come, and what was counted
    watch/quality/<model>/waiting/       labels whose row is not recorded (yet), and all labels by request columns
    watch/quality/<model>/<version>/     labelled rows by day

A kill at any time loses nothing: what is not in state.json is done again, with the same result.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from serin.formats.captures import Part
from serin.formats.shared_captures import records_source
from serin.machine.durable import write_whole
from serin.machine.private import make_private
from serin.monitoring.capture.read import alike, parts, read_part
from serin.monitoring.quality.joined import JoinedRows
from serin.monitoring.quality.keys import SOURCE, KeyIndex, captured_columns
from serin.monitoring.quality.labels import newest
from serin.monitoring.quality.scan import BATCH_ROWS, Found, Versions, Watched, answered, is_batch, search
from serin.monitoring.quality.state import QualityState, read_state, write_state
from serin.monitoring.quality.store import (
    ARRIVED,
    LabelFile,
    delete_old_labels,
    described,
    following,
    label_files,
    quality_folder,
    with_description,
    write_table,
)

_FORGOTTEN = "forgotten"

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

    def __init__(
        self, home: Path, model: str, versions: Versions, hooks: Hooks, records: Path | None = None
    ) -> None:
        """`records`: the home with the records; None: `home`, which has the labels."""
        self._home, self._model, self._versions, self._hooks = home, model, versions, hooks
        self.records = records or home
        self._folder = quality_folder(home, model)
        self.joined = JoinedRows(self._folder)
        self.state = read_state(self._folder)
        self._index = KeyIndex(self.records, model)
        self._work: Iterator[None] | None = None

    def advance(self) -> bool:
        """Does a bounded piece of work. Returns whether there is more to do. What was begun before rows were
        forgotten begins again without them, and the rows that are left are counted again."""
        with following(self._home, self._model) as folder:
            forgotten = last_forgotten(folder)
            if forgotten != self.state.forgotten:
                self._work = None
                self.state.count_again(forgotten)
            source = records_source(self.records, self._model)
            if source != self.state.source:
                self._work = None
                self.state.count_again(forgotten)
                self.state.source = source
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
            self._delete_before(moment)

    def _delete_before(self, moment: float) -> None:
        delete_old_labels(self._home, self._model, moment)
        self.joined.delete_before(moment)
        for file in self._waiting():
            table = file.read()
            kept = table.filter(pa.array(np.asarray(table.column(ARRIVED)) >= moment * 1e6))
            if kept.num_rows < table.num_rows:
                self._keep_waiting(file, kept)
        self.state.forget_before(moment)

    def waiting(self) -> int:
        """How many labels are about a request that is not recorded."""
        return sum(file.rows for file in self._waiting() if file.key.of_request)

    def _steps(self) -> Iterator[None]:
        yield from self._new_records()
        for files in _alike(label_files(self._home, self._model, after=self.state.labels)):
            yield from self._new_labels(files)

    def _new_labels(self, files: list[LabelFile]) -> Iterator[None]:
        """Joins files of labels with the same kind of key, in one search."""
        file, found = files[-1], Found()
        labels = newest(pa.concat_tables([each.read() for each in files]))
        for found in search(self.records, self._model, file, labels, self._versions, self._index):  # noqa: B007
            yield
        self._add(found)
        self.state.count(found)
        self.state.received += sum(each.rows for each in files)
        away = found.decided if file.key.of_request else set[int]()
        left = np.ones(labels.num_rows, bool)
        left[list(away)] = False
        if left.any():
            self._keep_waiting(file, labels.filter(pa.array(left)), add=True)
        self.state.labels = file.sequence
        write_state(self._folder, self.state)

    def _new_records(self) -> Iterator[None]:
        tables: dict[int, list[pa.Table]] = {}
        last = self.state.part
        for part in parts(self.records, self._model, after=self.state.part):
            table = self._read(part) if self._versions(part.version) is not None else None
            if table is None and self._versions(part.version) is not None:
                break  # merged just now: the next look finds its rows
            if table is not None:
                tables.setdefault(part.version, []).append(table)
            last = part.sequence
            if is_batch([table for own in tables.values() for table in own]):
                self._take(tables, last)
                tables = {}
                yield
        if last != self.state.part:
            self._take(tables, last)
            yield

    def _read(self, part: Part) -> pa.Table | None:
        watched = self._versions(part.version)
        assert watched is not None
        keys = [captured_columns(file.key, watched.schema) or () for file in self._waiting()]
        columns = dict.fromkeys([*watched.kept, SOURCE, *(name for key in keys for name in key)])
        return read_part(part, list(columns))

    def _take(self, tables: dict[int, list[pa.Table]], last: str | None) -> None:
        """Counts new records and joins them with the labels that wait for them."""
        for version, each in tables.items():
            watched = self._versions(version)
            assert watched is not None
            rows = answered(alike(each))
            self._hooks.recorded(watched, rows, self.state)
            for file in self._waiting():
                columns = captured_columns(file.key, watched.schema)
                if columns is None or watched.data.target.expression != file.expression:
                    continue
                labels, found = file.read(), Found()
                found.add(labels, rows, file.key, watched)
                found.settle()
                self._add(found)
                self.state.count(found)
                away = found.decided if file.key.of_request else set[int]()
                if away:
                    left = np.ones(labels.num_rows, bool)
                    left[list(away)] = False
                    self._keep_waiting(file, labels.filter(pa.array(left)))
        self.state.part = last
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

    def _waiting(self) -> list[LabelFile]:
        folder = self._folder / "waiting"
        return [described(path) for path in sorted(folder.glob("*.parquet"))] if folder.is_dir() else []

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
