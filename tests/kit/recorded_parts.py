"""Writes recorded requests without a ring, for tests."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from serin.formats.captures import METADATA, Part, commit, complete, last_number, read_document, writing


def write_part(home: Path, model: str, version: int, table: pa.Table) -> list[Part]:
    """Records the rows of `table`, which has at least `_id`, `_row` and `_t`; metadata columns that it lacks are null.

    Rows of several hours make several parts.
    """
    with writing(home, model) as folder:
        document = {**read_document(home, model), "last": last_number(home, model)}
        return commit(folder, document, [(version, complete(table))])


def rows_at(*times: float, **columns: list[object]) -> pa.Table:
    t = pa.array([round(t * 1e6) for t in times], pa.int64()).cast(METADATA["_t"])
    ids = [f"id-{t:.3f}" for t in times]
    return pa.table({"_id": ids, "_row": pa.array([0] * len(times), pa.int32()), "_t": t, **columns})
