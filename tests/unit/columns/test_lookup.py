import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from serin.columns.column import Column, column_from_wire, kind_of_type
from serin.columns.keys import KeyIndex
from serin.columns.lookup import lookup, lookup_to_onnx
from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.formats.schema import DTYPE_OF_KIND, INT64_NULL
from tests.unit.features.measured import run_model, strings

UTC = dt.UTC
TABLE = pa.table(
    {
        "tail": ["N1", "N2", None, "N3"],
        "number": pa.array([10, 20, 30, None], pa.int64()),
        "seats": pa.array([149, None, 7, 3], pa.int64()),
        "weight": pa.array([1.5, 2.5, None, 0.1], pa.float32()),
        "maker": ["AIRBUS", "", "X", None],
        "jet": [True, None, True, False],
        "built": pa.array(
            [dt.datetime(1999, 5, 4, tzinfo=UTC), None, None, None], pa.timestamp("us", tz="UTC")
        ),
    }
)
COLUMNS = ["seats", "weight", "maker", "jet", "built"]
WIRE = {
    "tail": np.asarray(["N3", "", "N2", "nobody", "N1"], object),
    "number": np.asarray([20, 10, INT64_NULL, 99, 30], np.int64),
}


@pytest.mark.parametrize("key", ["tail", "number"])
def test_the_graph_finds_what_the_arrays_find(key: str) -> None:
    wire = WIRE[key]
    kind = "string" if key == "tail" else "int"
    expected = lookup(TABLE, key, column_from_wire(wire, kind), COLUMNS)  # type: ignore[arg-type]
    found = run_lookup(TABLE, key, wire)
    for name in COLUMNS:
        assert np.array_equal(found[name], expected[name].to_wire(), equal_nan=name == "weight"), name


def test_an_unknown_or_null_key_finds_nulls() -> None:
    found = lookup(TABLE, "tail", strings("nobody", None), COLUMNS)
    assert [column.null.tolist() for column in found.values()] == [[True, True]] * len(COLUMNS)


def test_an_empty_table_gives_nulls_to_everyone() -> None:
    found = run_lookup(TABLE.slice(0, 0), "tail", WIRE["tail"])
    assert found["maker"].tolist() == [""] * 5
    assert np.isnan(found["weight"]).all()


def test_a_key_that_stands_twice_is_found_with_its_row_and_count() -> None:
    keys = [strings("a", None, "b", "a", None, "a", "b")]
    assert KeyIndex(keys).duplicate() == (0, 3)
    assert KeyIndex([strings("a", None, "b", None)]).duplicate() is None


def test_wide_keys_are_hashed_and_found_as_narrow_ones_are() -> None:
    rng = np.random.default_rng(1)
    left = [column_from_wire(rng.permutation(6000).astype(np.int64) * 997, "int") for _ in range(2)]
    order = rng.permutation(6000)
    assert np.array_equal(KeyIndex(left).find([column[order] for column in left]), order)
    assert (KeyIndex(left).find([left[0], left[1][np.roll(order, 1)]]) >= -1).all()


def run_lookup(table: pa.Table, key: str, wire: np.ndarray) -> dict[str, np.ndarray]:
    graph = GraphBuilder()
    names = lookup_to_onnx(graph, table, key, "key", COLUMNS)
    outputs = {
        names[name]: (
            ELEMENT_OF_DTYPE[DTYPE_OF_KIND[kind_of_type(table.schema.field(name).type) or ""]],
            ["batch"],
        )
        for name in COLUMNS
    }
    element = ELEMENT_OF_DTYPE["BYTES" if wire.dtype == object else "INT64"]
    found = run_model(graph.to_model({"key": (element, ["batch"])}, outputs), {"key": wire})
    return dict(zip(COLUMNS, found, strict=True))


def test_few_values_are_found_among_many_as_many_are() -> None:
    draw = np.random.default_rng(4)
    keys = draw.choice(10**12, 100_000, replace=False)
    index = KeyIndex([Column(kind="int", values=keys)])
    asked = np.concatenate([keys[::20], draw.choice(10**12, 5_000), [INT64_NULL, 0, 2**62]])
    few = index.find([Column(kind="int", values=asked)])
    many = index.find([Column(kind="int", values=np.tile(asked, 10))])
    assert (np.tile(few, 10) == many).all()
    assert (few[:5000] == np.arange(0, 100_000, 20)).all()
    assert few[-3:].tolist() == [-1, -1, -1]
