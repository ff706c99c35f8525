"""Integers reach a model exactly or not at all, whatever carries them and however a missing one is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serin.errors import RowsUnfit
from serin.formats.rows import read_rows
from serin.formats.schema import INT64_NULL, Schema, input_columns, outputs_of
from serin.formats.wire import as_arrow, to_wire
from serin.serving.client.client import _table

SCHEMA = Schema(
    task="binary",
    inputs=input_columns([{"name": "id", "kind": "int", "dtype": "INT64"}]),
    outputs=outputs_of("binary"),
)
Ids = list[int | None]
ids = st.lists(
    st.one_of(
        st.none(),
        st.integers(-(2**63) + 1, 2**63 - 1),
        st.integers(2**53 - 3, 2**53 + 3),
        st.integers(-(2**53) - 3, -(2**53) + 3),
        st.integers(2**24 - 3, 2**24 + 3),
        st.integers(-9, 9),
    ),
    min_size=1,
    max_size=8,
)


def from_file(suffix: str) -> Callable[[Ids, Path], Any]:
    def carry(values: Ids, folder: Path) -> pa.Table:
        path, frame = folder / f"rows{suffix}", pd.DataFrame({"id": values, "n": range(len(values))})
        match suffix:
            case ".csv":
                lines = "".join(f"{'NA' if value is None else value},0\n" for value in values)
                path.write_text(f"id,n\n{lines}")
            case ".jsonl":
                path.write_text("".join(json.dumps({"id": value}) + "\n" for value in values))
            case _:
                frame.to_parquet(path)
        return pa.concat_tables(read_rows(path, SCHEMA))

    return carry


def narrow(values: Ids, kind: str) -> pd.DataFrame:
    numbers = [np.nan if value is None else value for value in values]
    return pd.DataFrame({"id": np.asarray(numbers, kind)})


EXACT: dict[str, Callable[[Ids, Path], Any]] = {
    "nullable frame": lambda values, _: pd.DataFrame({"id": pd.array(values, "Int64")}),
    "arrow frame": lambda values, _: pd.DataFrame({"id": pd.array(values, "int64[pyarrow]")}),
    "object frame": lambda values, _: pd.DataFrame({"id": pd.Series(values, dtype=object)}),
    "table": lambda values, _: pa.table({"id": pa.array(values, pa.int64())}),
    "dicts": lambda values, _: [{"id": values[0]}, *({"id": n} if n is not None else {} for n in values[1:])],
    "columns": lambda values, _: {"id": values},
    "csv": from_file(".csv"),
    "json": from_file(".jsonl"),
}
BENDING: dict[str, Callable[[Ids, Path], Any]] = {
    "frame": lambda values, _: pd.DataFrame({"id": values}),
    "float64": lambda values, _: narrow(values, "float64"),
    "float32": lambda values, _: narrow(values, "float32"),
    "float16": lambda values, _: narrow(values, "float16"),
    "parquet by pandas": from_file(".parquet"),
}


@settings(max_examples=30, deadline=None)
@given(ids)
@example([2**53 + 1, None])
@example([-(2**53) - 1, None])
@example([2**24 + 1, None])
@example([None, None])
def test_integers_are_carried_exactly_or_refused(values: Ids) -> None:
    wanted = [INT64_NULL if value is None else value for value in values]
    with tempfile.TemporaryDirectory() as scratch:
        for name, carry in (EXACT | BENDING).items():
            with np.errstate(over="ignore"):
                given_rows = carry(values, Path(scratch))
            refusals = RowsUnfit if name in BENDING else ()
            try:
                found = to_wire(as_arrow(_table(given_rows)), SCHEMA)["id"][:, 0].tolist()
            except refusals as error:
                refusal = str(error)
            else:
                refusal = ""
                assert found == wanted, name
            assert not refusal or "Int64" in refusal


@pytest.mark.parametrize("largest", [2**53 - 1, -(2**53) + 1])
def test_floats_that_no_other_integer_could_have_become_are_taken(largest: int) -> None:
    frame = pd.DataFrame({"id": [largest, None]})
    assert to_wire(frame, SCHEMA)["id"][:, 0].tolist() == [largest, INT64_NULL]
