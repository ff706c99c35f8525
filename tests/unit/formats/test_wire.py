import datetime as dt
import decimal
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from serin.errors import RowsUnfit
from serin.formats.schema import DTYPE_OF_KIND, INT64_NULL, InputColumn, Schema, input_columns, outputs_of
from serin.formats.wire import to_wire

UTC = dt.UTC


def schema(**kinds: str) -> Schema:
    entries = [{"name": name, "kind": kind, "dtype": DTYPE_OF_KIND[kind]} for name, kind in kinds.items()]
    return Schema(task="binary", inputs=input_columns(entries), outputs=outputs_of("binary"))


def one(kind: str, values: object) -> list[object]:
    array = to_wire(pa.table({"a": values}), schema(a=kind))["a"]
    assert array.ndim == 2
    assert array.shape[1] == 1
    return array[:, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "values", "wire"),
    [
        ("string", pa.array(["x", None, "", "ü"]), ["x", "", "", "ü"]),
        ("string", pa.array(["x", None, "x"]).dictionary_encode(), ["x", "", "x"]),
        ("string", pa.array([b"ab", None]), ["ab", ""]),
        ("int", pa.array([1, None], pa.int16()), [1, INT64_NULL]),
        ("int", pa.array([1.0, float("nan"), None]), [1, INT64_NULL, INT64_NULL]),
        ("int", pa.array([2**63 - 1]), [2**63 - 1]),
        ("float", pa.array([1, 2]), [1.0, 2.0]),
        ("float", pa.array([0.1], pa.float64()), [float(np.float32(0.1))]),
        ("float", pa.array([decimal.Decimal("1.5")]), [1.5]),
        ("float", pa.array([1e300]), [math.inf]),
        ("bool", pa.array([True, False, None]), [1, 0, -1]),
        ("bool", pa.array([1.0, None]), [1, -1]),
        ("timestamp", pa.array([dt.date(1970, 1, 2), None]), [86_400_000_000, INT64_NULL]),
        ("timestamp", pa.array([-1, None], pa.timestamp("ns")), [-1, INT64_NULL]),
        ("timestamp", pa.array([3], pa.timestamp("s")), [3_000_000]),
        ("timestamp", pa.array([3], pa.timestamp("ms", tz="America/New_York")), [3_000]),
        ("timestamp", pa.array(["1970-01-01T00:00:01", None, ""]), [1_000_000, INT64_NULL, INT64_NULL]),
        ("timestamp", pa.array(["1970-01-01T02:00:00+02:00"]), [0]),
        ("timestamp", pa.nulls(1), [INT64_NULL]),
        ("string", pa.nulls(2), ["", ""]),
        ("bool", pa.nulls(1), [-1]),
    ],
)
def test_each_kind_travels_with_its_own_null(kind: str, values: pa.Array, wire: list[object]) -> None:
    assert one(kind, values) == wire


def test_a_missing_float_is_nan_whatever_its_source() -> None:
    for values in (pa.array([None, float("nan")]), pa.array([None, None], pa.int64()), pa.nulls(2)):
        assert all(math.isnan(value) for value in one("float", values))  # type: ignore[arg-type]


def test_a_frame_and_its_wire_form_give_the_same_arrays() -> None:
    kinds = schema(s="string", f="float", i="int", t="timestamp", b="bool")
    frame = pd.DataFrame(
        {
            "s": ["x", None],
            "f": [0.1, None],
            "i": [7, None],
            "t": pd.to_datetime(["2013-01-31T05:00:00Z", None]),
            "b": pd.array([True, None], dtype="boolean"),
            "unused": [1, 2],
        }
    )
    once = to_wire(frame, kinds)
    again = to_wire(pa.table({name: array[:, 0] for name, array in once.items()}), kinds)
    assert once.keys() == again.keys() == {"s", "f", "i", "t", "b"}
    for name, array in once.items():
        np.testing.assert_array_equal(array, again[name], strict=True)
    assert once["t"][0, 0] == dt.datetime(2013, 1, 31, 5, tzinfo=UTC).timestamp() * 1e6


def test_no_rows_give_empty_arrays_of_the_right_type() -> None:
    table = pa.table({"s": pa.array([], pa.string()), "f": pa.array([], pa.float64())})
    wire = to_wire(table, schema(s="string", f="float"))
    assert {name: (array.shape, array.dtype) for name, array in wire.items()} == {
        "s": ((0, 1), np.dtype(object)),
        "f": ((0, 1), np.dtype(np.float32)),
    }


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("string", pa.array([1]), "convert it to text"),
        ("string", pa.array([b"\xff"]), "UTF8"),
        ("int", pa.array([1.5]), "not whole"),
        ("int", pa.array(["1"]), "to integers"),
        ("int", pa.array([2**63], pa.uint64()), "int64"),
        ("float", pa.array(["1"]), "number"),
        ("bool", pa.array([2]), "other than 0 and 1"),
        ("bool", pa.array(["yes"]), "true and false"),
        ("timestamp", pa.array([1.0]), "timestamp"),
        ("timestamp", pa.array(["yesterday"]), "timestamp"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_column_and_its_type(
    kind: str, values: pa.Array, reason: str
) -> None:
    with pytest.raises(RowsUnfit, match=reason) as refusal:
        one(kind, values)
    assert "'a'" in str(refusal.value)
    assert str(values.type) in str(refusal.value)


def test_a_missing_column_is_named_with_the_nearest_one() -> None:
    with pytest.raises(RowsUnfit, match="'tailnum' is missing; did you mean 'tail_num'"):
        to_wire(pa.table({"tail_num": ["N1"]}), schema(tailnum="string"))


def test_two_inputs_of_one_name_or_a_kind_of_another_type_are_not_a_schema() -> None:
    entry = {"name": "a", "kind": "int", "dtype": "INT64"}
    with pytest.raises(ValueError, match="same name"):
        input_columns([entry, entry])
    with pytest.raises(ValueError, match="does not travel"):
        input_columns([{**entry, "dtype": "FP32"}])
    assert input_columns([entry]) == (
        InputColumn(name="a", dtype="INT64", kind="int", source="request", null=str(INT64_NULL)),
    )
