"""Reads rows of a dataset's splits as requests: read and joined again from the tables.

A dataset stores features, not requests, and a model of another spec can only score requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.errors import TableEmpty
from serin.etl.binding.layout import Layout, lay_out
from serin.etl.dataset.golden import ARROW
from serin.etl.engines.attempts import run_within_memory
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.prepare import Preparation, prepare_pieces
from serin.etl.relational.relation import Prepared
from serin.etl.sources.find import find_again
from serin.etl.sources.tables import Piece, open_table
from serin.formats.dataset import read_dataset
from serin.formats.schema import InputColumn
from serin.formats.shards import read_split
from serin.formats.wire import RawRows, TrainingRows
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.store.artifacts import Dataset

T = TypeVar("T")
Ids = npt.NDArray[np.int64]


def read_test_rows(
    data: DataSpec, features: Sequence[FeatureSpec], dataset: Dataset, *, max_rows: int
) -> RawRows:
    """At most `max_rows` rows, the newest by `data.time` (else the last), oldest first, with every request column that
    `features` need. DataError or SpecError when the tables do not have them."""
    split = read_split(dataset.path, "test").whole()

    def read(engine: Engine, held: Held, layout: Layout) -> RawRows:
        ids = _newest(engine.collect(times_of, held, np.asarray(split.rows)), max_rows)
        table = pa.concat_tables(engine.collect(requests_of, held, np.sort(ids), layout.inputs))
        return _in_order(table, ids, split.rows, split.target)

    return _prepared(data, features, dataset, read)


def read_training_rows(
    data: DataSpec, features: Sequence[FeatureSpec], dataset: Dataset, *, max_rows: int
) -> TrainingRows:
    """At most `max_rows` rows, evenly spread over the training split, with every request column. The tables are read
    and joined once more, in this process."""
    rows = np.sort(np.asarray(read_split(dataset.path, "train").whole().rows))
    ids = rows[:: -(-len(rows) // max_rows)]

    def read(engine: Engine, held: Held, layout: Layout) -> TrainingRows:
        found = engine.collect(columns_of, held, ids, layout.inputs)
        table = pa.concat_tables([part.unify_dictionaries() for part in found]).combine_chunks()
        if not len(table):
            raise TableEmpty(
                table="train", why="none of the dataset's training rows is in the tables any more"
            )
        moments = table.column("\0time").to_numpy()
        order = pa.array(np.argsort(moments, kind="stable"))
        return TrainingRows(
            table=table.drop_columns("\0time").take(order),
            times=None if data.time is None else np.sort(moments) / 1e6,
            total=len(rows),
        )

    return _prepared(data, features, dataset, read)


def _prepared(
    data: DataSpec,
    features: Sequence[FeatureSpec],
    dataset: Dataset,
    read: Callable[[Engine, Held, Layout], T],
) -> T:
    """What `read` takes from the prepared pieces of the tables."""
    with tempfile.TemporaryDirectory(prefix="serin-rows-") as folder:
        scratch = Path(folder)
        sources = read_dataset(dataset.path).sources
        tables = {
            name: open_table(name, find_again(name, table, sources, scratch), scratch)
            for name, table in data.tables.items()
        }
        layout = lay_out(data, features, tables)
        work = Preparation(data=data, features=features, layout=layout, tables=tables, scratch=scratch)

        def run(engine: Engine, pieces: Sequence[Piece], rows: int) -> T:
            held, _ = prepare_pieces(work, engine, pieces, rows=rows)
            return read(engine, held, layout)

        plain = EtlSpec(engine="process")  # a few rows of few columns: no cluster is worth its start
        return run_within_memory(
            run, table=tables[data.main], layout=layout, etl=plain, data_bytes=0, scratch=scratch
        )


def times_of(prepared: Prepared, ids: Ids) -> tuple[Ids, Ids]:
    """Which of the rows are in this piece, and their times (their ids, when there is no time)."""
    inside = np.isin(prepared.rows, ids)
    rows = prepared.rows[inside]
    return rows, rows if prepared.time is None else np.asarray(prepared.time)[inside]


def requests_of(prepared: Prepared, ids: Ids, inputs: Sequence[InputColumn]) -> pa.Table:
    """The piece's rows among `ids`: request columns in wire form, and `row`."""
    inside = np.flatnonzero(np.isin(prepared.rows, ids))
    columns = {
        column.name: pa.array(
            prepared.columns[column.name][inside].on_host().to_wire(), ARROW[column.kind], from_pandas=False
        )
        for column in inputs
    }
    return pa.table({**columns, "\0row": pa.array(prepared.rows[inside])})


def columns_of(prepared: Prepared, ids: Ids, inputs: Sequence[InputColumn]) -> pa.Table:
    """The piece's rows among `ids`: request columns with natural types and true nulls, and `time` (or the id)."""
    inside = np.flatnonzero(np.isin(prepared.rows, ids))
    columns = {column.name: prepared.columns[column.name][inside].on_host().to_arrow() for column in inputs}
    moments = prepared.rows if prepared.time is None else np.asarray(prepared.time)
    return pa.table({**columns, "\0time": pa.array(moments[inside])})


def _newest(times: Sequence[tuple[Ids, Ids]], most: int) -> Ids:
    """The ids of the newest rows, oldest first; ties by id."""
    rows = np.concatenate([own for own, _ in times])
    if not len(rows):
        raise TableEmpty(table="test", why="none of the dataset's test rows is in the tables any more")
    moments = np.concatenate([own for _, own in times])
    return rows[np.lexsort((rows, moments))][-most:]


def _in_order(table: pa.Table, ids: Ids, known: Ids, target: npt.NDArray[np.float32]) -> RawRows:
    row = table.column("\0row").to_numpy()
    order = np.argsort(row, kind="stable")
    place = order[np.searchsorted(row[order], ids)]
    by_id = np.argsort(known, kind="stable")
    own = by_id[np.searchsorted(known[by_id], ids)]
    return RawRows(
        table=table.drop_columns("\0row").take(pa.array(place)), target=np.asarray(target[own]), row=ids
    )
