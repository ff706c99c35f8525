"""Deletes the labels of recorded rows that are deleted: of a person who asked to be forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.machine.durable import sync
from serin.monitoring.quality.follow import mark_forgotten
from serin.monitoring.quality.joined import JoinedRows
from serin.monitoring.quality.keys import ID, ROW, Key, captured_columns, captured_keys
from serin.monitoring.quality.scan import Versions
from serin.monitoring.quality.store import (
    KEY,
    LabelFile,
    described,
    following,
    label_files,
    labels_folder,
    rewrite_labels,
)


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
    waiting = folder / "waiting"
    kept_back = [described(path) for path in waiting.glob("*.parquet")] if waiting.is_dir() else []

    def keep(file: LabelFile, labels: pa.Table) -> npt.NDArray[np.bool_]:
        gone = pa.concat_arrays([pa.array([], pa.string()), *_keys(file.key, rows, versions)])
        return ~np.asarray(pc.is_in(labels.column(KEY), value_set=gone))

    deleted = rewrite_labels(label_files(home, model), keep)
    rewrite_labels(kept_back, keep)
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
