"""Columns, their hashes and look-ups."""

import datetime as dt

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import helper

from serin.columns.column import Column, column_from_arrow, column_from_wire, kind_of_type
from serin.columns.hashing import hash_ints, hash_strings
from serin.columns.keys import KeyIndex, lookup, lookup_to_onnx
from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.formats.schema import DTYPE_OF_KIND, INT64_NULL, NULL_OF_KIND, InputColumn, Kind
from serin.formats.wire import wire_column
from tests.unit.features.measured import run_model, strings

MOMENT = dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
ARRAYS = {
    "float64": pa.array([1.1, None, float("nan"), 1e300, -0.0]),
    "float32": pa.array([1.5, None, 3], pa.float32()),
    "no nulls": pa.array([1.5, 2.5], pa.float32()),
    "int16": pa.array([-5, None, 7], pa.int16()),
    "uint64": pa.array([5, None], pa.uint64()),
    "decimal": pa.array([None, 5], pa.decimal128(9, 2)),
    "bool": pa.array([True, None, False]),
    "text": pa.array(["a", None, "", "é", "a"]),
    "large text": pa.array(["a", None], pa.large_string()),
    "dictionary": pa.array(["a", None, "", "b"]).dictionary_encode(),
    "dictionary of ints": pa.array([5, None, 5]).dictionary_encode(),
    "seconds": pa.array([MOMENT.replace(microsecond=0), None], pa.timestamp("s")),
    "nanoseconds": pa.array([-1, None, 1999], pa.int64()).cast(pa.timestamp("ns", tz="UTC")),
    "zone": pa.array([MOMENT, None], pa.timestamp("us", tz="Asia/Tokyo")),
    "date": pa.array([dt.date(1960, 2, 29), None]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_column_of_the_etl_is_what_the_same_column_is_in_a_request(name: str) -> None:
    values = pa.chunked_array([ARRAYS[name], ARRAYS[name][:1]])
    kind = kind_of_type(values.type)
    assert kind is not None
    ours, wire = column_from_arrow(values, kind).to_wire(), wire_column(values, entry(kind)).reshape(-1)
    assert ours.dtype == wire.dtype
    assert ours.tolist() == wire.tolist() or np.array_equal(ours, wire, equal_nan=True)


def test_text_that_is_a_time_is_read_once_per_distinct_text() -> None:
    texts = pa.array(["2013-01-01T05:00:00Z", "", None, "1970-01-01T00:00:01Z"]).dictionary_encode()
    values = column_from_arrow(pa.chunked_array([texts, texts]), "timestamp").values
    assert values.tolist() == [1357016400000000, INT64_NULL, INT64_NULL, 1000000] * 2


def test_text_that_is_not_a_time_does_not_become_one() -> None:
    with pytest.raises(pa.ArrowInvalid):
        column_from_arrow(pa.array(["2013-01-01", "soon"]), "timestamp")


def test_empty_text_and_null_leave_the_dictionary_and_are_null() -> None:
    column = column_from_arrow(ARRAYS["dictionary"], "string")
    assert column.null.tolist() == [False, True, True, False]
    assert column.dictionary.to_pylist() == ["a", "b"]


def test_rows_are_taken_by_position_and_minus_one_is_null() -> None:
    for name in ("float32", "int16", "bool", "text", "seconds"):
        column = column_from_arrow(ARRAYS[name], kind_of_type(ARRAYS[name].type))  # type: ignore[arg-type]
        assert column.take_or_null(np.asarray([-1, 0, 1])).null.tolist() == [True, False, True]


@pytest.mark.parametrize("arrow", [pa.time32("s"), pa.duration("s"), pa.list_(pa.int64()), pa.binary()])
def test_types_that_no_feature_is_made_of_have_no_kind(arrow: pa.DataType) -> None:
    assert kind_of_type(arrow) is None


def entry(kind: Kind) -> InputColumn:
    return InputColumn(name="x", dtype=DTYPE_OF_KIND[kind], kind=kind, null=NULL_OF_KIND[kind])


TEXTS = ["", "a", "ab", "abc", "abcd", "hello, world", "ünïcödé €", "x" * 100, "日本"]
INTS = np.asarray([0, 1, -1, 2**63 - 1, -(2**63), 336_776], np.int64)


def test_known_hashes_of_texts() -> None:
    known = {"": 0, "a": 0x3C2569B2, "abc": 0xB3DD93FA, "hello, world": 0x149BBB7F}
    assert hash_strings(pa.array(list(known))).tolist() == list(known.values())


@pytest.mark.parametrize("values", [np.asarray(TEXTS, object), INTS], ids=["texts", "ints"])
def test_onnx_runtime_gives_the_same_hash(values: np.ndarray) -> None:
    element = onnx.TensorProto.STRING if values.dtype == object else onnx.TensorProto.INT64
    node = helper.make_node("MurmurHash3", ["x"], ["y"], domain="com.microsoft", positive=1, seed=0)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", element, ["n"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.UINT32, ["n"])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    (expected,) = run_model(helper.make_model(graph, opset_imports=opsets, ir_version=10), {"x": values})
    ours = hash_strings(pa.array(TEXTS)) if values.dtype == object else hash_ints(INTS)
    assert ours.tolist() == expected.tolist()


def test_a_slice_of_texts_is_hashed_by_its_own_bytes() -> None:
    assert hash_strings(pa.array(TEXTS)[3:6]).tolist() == hash_strings(pa.array(TEXTS[3:6])).tolist()


def test_no_texts_have_no_hashes() -> None:
    assert len(hash_strings(pa.array([], pa.string()))) == 0


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
