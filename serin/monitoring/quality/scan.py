"""Looks for the recorded rows of labels, hour by hour: memory is bounded by a batch of hours and the matches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.captures import ANSWER, column_names, hour_folders
from serin.formats.schema import Schema
from serin.monitoring.capture.read import Sources, alike, captured_hour
from serin.monitoring.quality.keys import (
    CLIENT_ID,
    ID,
    RELEASE,
    ROW,
    TIME,
    Key,
    KeyIndex,
    captured_columns,
    captured_keys,
    first_rows,
    hashes,
    request_of,
)
from serin.monitoring.quality.store import ARRIVED, KEY, LABEL, ONLY_ROW, WHEN, LabelFile
from serin.spec.data import DataSpec

BATCH_ROWS, BATCH_BYTES = 1 << 18, 128 << 20
_HOURS = 50  # of a step of a search
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is known of a version whose requests are recorded."""

    version: int
    schema: Schema
    data: DataSpec
    segments: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """The column of the records that labels are compared with: the scores, or the classes' probabilities."""
        return f"{ANSWER}{answer_of(self.schema)}"

    @property
    def segment_columns(self) -> dict[str, str]:
        """The columns of the records that hold the segments, by name of the request column."""
        names = column_names([column.name for column in self.schema.inputs])
        return {name: names[name] for name in self.segments if name in names}

    @property
    def kept(self) -> list[str]:
        return [ID, ROW, TIME, RELEASE, self.answer, *self.segment_columns.values()]


def answer_of(schema: Schema) -> str | None:
    """The output that labels are compared with, or the only one; None for a model that has its own outputs instead."""
    name, names = (
        "probabilities" if schema.task == "multiclass" else "score",
        [each.name for each in schema.outputs],
    )
    return name if name in names else names[0] if len(names) == 1 else None


Versions = Callable[[int], Watched | None]
"""None: the version is not in the store any more."""


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search has found so far. `labels`: positions of labels with a row. `unclear`: without a row number, for a
    request of several rows. `ambiguous`: with several requests. `beyond`: with a row that the request does not
    have."""

    labels: set[int] = field(default_factory=set)
    unclear: set[int] = field(default_factory=set)
    ambiguous: set[int] = field(default_factory=set)
    beyond: set[int] = field(default_factory=set)
    rows: dict[int, list[pa.Table]] = field(default_factory=dict)  # by version
    _places: list[tuple[Places, pa.ChunkedArray]] = field(default_factory=list)

    @property
    def decided(self) -> set[int]:
        """The labels that no later record can be about, when they are about a request."""
        return self.labels | self.ambiguous | self.unclear | self.beyond

    def add(self, labels: pa.Table, rows: pa.Table, key: Key, watched: Watched) -> None:
        matches = match(labels, rows, key, watched.schema)
        self.unclear.update(matches.unclear.tolist())
        self.beyond.update(matches.beyond.tolist())
        if key.by == (CLIENT_ID,):
            places = np.concatenate([matches.labels, matches.unclear])
            requests = rows.column(ID).take(pa.array(np.concatenate([matches.rows, matches.unclear_rows])))
            self._places.append((places, requests))
        if not len(matches.rows):
            return
        self.labels.update(matches.labels.tolist())
        table = joined_rows(
            labels, rows, matches, [name for name in watched.kept if name in rows.column_names]
        )
        if key.by == (CLIENT_ID,):
            table = table.append_column("_place", pa.array(matches.labels))
        self.rows.setdefault(watched.version, []).append(table)

    def settle(self) -> None:
        """Takes out labels that turned out to be about several requests. Call it when the search is done."""
        self.beyond -= self.labels
        if not self._places:
            return
        labels = np.concatenate([places for places, _ in self._places])
        ids = pa.chunked_array([chunk for _, column in self._places for chunk in column.chunks], pa.string())
        self.ambiguous = set(ambiguous(ids, labels).tolist())
        self.labels -= self.ambiguous
        self.unclear -= self.ambiguous
        bad = pa.array(sorted(self.ambiguous), pa.int64())
        for version, tables in self.rows.items():
            self.rows[version] = [
                table.filter(pc.invert(pc.is_in(table.column("_place"), value_set=bad))).drop_columns(
                    ["_place"]
                )
                for table in tables
            ]


def search(
    sources: Sources, model: str, file: LabelFile, labels: pa.Table, versions: Versions, index: KeyIndex
) -> Iterator[Found]:
    """Searches all recorded rows for those that the labels are about, the newest hours first. Yields after each step
    what it has found so far; the last one is settled."""
    found, key = Found(), file.key
    keys = labels.column(KEY).combine_chunks()
    wanted = hashes(pa.concat_arrays([keys, first_rows(keys)]) if key.by == (ID,) else keys)
    waiting: dict[int, list[pa.Table]] = {}
    for step, (hour, watched) in enumerate(_hours(sources, model, file, versions)):
        if index.may_have(hour, key, watched.schema, wanted):
            own = waiting.setdefault(watched.version, [])
            own += _read_hour(watched, hour, key)
            if is_batch(own):
                found.add(labels, alike(waiting.pop(watched.version)), key, watched)
                if key.by == (ID,) and len(found.labels) == labels.num_rows:
                    break  # an id is of one request
        if step % _HOURS == 0:
            yield found
    for version, tables in waiting.items():
        known = versions(version)
        if known is not None and tables:
            found.add(labels, alike(tables), key, known)
    found.settle()
    yield found


def is_batch(tables: Sequence[pa.Table]) -> bool:
    """Whether these are as many rows, or bytes, as are looked at together."""
    rows = sum(table.num_rows for table in tables)
    return bool(rows >= BATCH_ROWS or sum(table.nbytes for table in tables) >= BATCH_BYTES)


def _hours(
    sources: Sources, model: str, file: LabelFile, versions: Versions
) -> Iterator[tuple[Path, Watched]]:
    """The folders of the recorded hours of the versions that the labels can be about, newest first."""
    found = [hour for source in sources.values() for hour in hour_folders(source.home, model)]
    for hour in sorted(found, key=lambda hour: hour.name, reverse=True):
        watched = versions(int(hour.parent.name))
        if watched is None or watched.data.target.expression != file.expression:
            continue
        if captured_columns(file.key, watched.schema) is not None:
            yield hour, watched


def _read_hour(watched: Watched, hour: Path, key: Key) -> list[pa.Table]:
    columns = dict.fromkeys([*watched.kept, *(captured_columns(key, watched.schema) or ())])
    table = captured_hour(hour, list(columns))
    return [] if table is None else [table]


# A label by request id is about one row. A label by the client's id is about the request with this id that was recorded
# before the label arrived; when there are several, it is ambiguous and not used. A label by request columns is about
# every row with these values. A label that names no row is about a request with a single row. Requests are recorded
# whole: a label for a row that its request does not have is about nothing.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matches:
    """`labels` and `rows`: positions that belong together. `unclear` and `unclear_rows`: positions of labels without a
    row number, and of the first row of their request, which has several. `beyond`: positions of labels by id whose
    request does not have their row."""

    labels: Places
    rows: Places
    unclear: Places
    unclear_rows: Places
    beyond: Places


def match(labels: pa.Table, rows: pa.Table, key: Key, schema: Schema) -> Matches:
    """Finds the rows that labels are about. `labels` have different keys; `rows` are recorded ones."""
    found = pc.index_in(captured_keys(rows, key, schema), value_set=labels.column(KEY).combine_chunks())
    hit = np.flatnonzero(np.asarray(found.is_valid()))
    place = np.asarray(found.fill_null(0), np.int64)[hit]
    if key.by == (CLIENT_ID,):
        asked = np.asarray(rows.column(TIME).cast(pa.int64()), np.int64)[hit]
        before = asked <= np.asarray(labels.column(ARRIVED), np.int64)[place]
        hit, place = hit[before], place[before]
    unclear = unclear_rows = np.zeros(0, np.int64)
    if key.of_request and len(hit):
        wide = pc.unique(rows.column(ID).filter(pc.greater(rows.column(ROW), 0)))
        several = np.asarray(pc.is_in(rows.column(ID).take(pa.array(hit)), value_set=wide.cast(pa.string())))
        bad = several & np.asarray(labels.column(ONLY_ROW))[place]
        unclear, unclear_rows, hit, place = place[bad], hit[bad], hit[~bad], place[~bad]
    beyond = np.zeros(0, np.int64)
    if key.by == (ID,):  # a client's id may be of another request, which is not recorded yet
        asked_for = np.asarray(
            pc.is_in(
                request_of(labels.column(KEY).combine_chunks()),
                value_set=pc.unique(rows.column(ID)).cast(pa.string()),
            )
        )
        asked_for[np.asarray(found.drop_null())] = False
        beyond = np.flatnonzero(asked_for)
    return Matches(labels=place, rows=hit, unclear=unclear, unclear_rows=unclear_rows, beyond=beyond)


def joined_rows(labels: pa.Table, rows: pa.Table, found: Matches, keep: list[str]) -> pa.Table:
    """The matched rows with their labels: `keep` of the recorded columns, and label, when, arrived."""
    taken = rows.select(keep).take(pa.array(found.rows))
    given = labels.select([LABEL, WHEN, ARRIVED]).take(pa.array(found.labels))
    for name in given.column_names:
        taken = taken.append_column(name, given.column(name))
    return taken


def ambiguous(requests: pa.ChunkedArray, labels: Places) -> Places:
    """The positions of labels that were matched with several requests. `requests`: the id of each match."""
    codes = requests.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    pairs = np.unique(np.stack([labels, codes.astype(np.int64)], axis=1), axis=0)
    each, counts = np.unique(pairs[:, 0], return_counts=True)
    return np.asarray(each[counts > 1], np.int64)
