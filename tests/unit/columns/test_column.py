import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from serin.columns.column import column_from_arrow, kind_of_type
from serin.formats.schema import DTYPE_OF_KIND, INT64_NULL, NULL_OF_KIND, InputColumn, Kind
from serin.formats.wire import wire_column

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
    assert column.dictionary is not None
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
