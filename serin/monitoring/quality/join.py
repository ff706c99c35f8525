"""Joins labels with recorded rows. Pure: tables go in, tables come out.

A label by request id is about one row. A label by the client's id is about the request with this id that was recorded
before the label arrived; when there are several, it is ambiguous and not used. A label by request columns is about
every row with these values. A label that names no row is about a request with a single row. Requests are recorded
whole: a label for a row that its request does not have is about nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.schema import Schema
from serin.monitoring.quality.keys import CLIENT_ID, ID, ROW, TIME, Key, captured_keys, request_of
from serin.monitoring.quality.store import ARRIVED, KEY, LABEL, ONLY_ROW, WHEN

Places = npt.NDArray[np.int64]


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
