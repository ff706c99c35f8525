"""Columns that lie in tables: the same answers, features and rows as the same columns without a table."""

import pickle

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.columns.coded import CodedColumn, Places, compact, look_up
from serin.columns.column import Column, column_from_arrow, take
from serin.columns.keys import Grid, KeyIndex
from serin.features.aggregates.aggregate import (
    MOST,
    Aggregate,
    Counted,
    add_counted,
    answer_counted,
    measure_sample,
    merge_answers,
)
from serin.features.aggregates.exact_sums import ExactSums
from serin.features.aggregates.value_counts import HighBits, LowBits, NumberCounts, ValueCounts, ValueTable
from serin.features.fitted import Sample
from serin.features.numbers import Numbers
from serin.features.ops.fill import FittedFillMedian
from serin.formats.schema import INT64_NULL

floats = st.lists(
    st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")])), min_size=1
)


def coded(entries: list[float], places: list[int]) -> CodedColumn:
    table = np.asarray(entries, np.float32)
    return CodedColumn(kind="float", entries=table, places=Places(np.asarray(places, np.intp) % len(table)))


def plain(column: Column) -> Column:
    return Column(kind=column.kind, values=column.values.copy(), dictionary=column.dictionary)


def comparable(answer: object) -> object:
    if isinstance(answer, ValueTable):
        counts = answer.counts.tolist()
        return sorted(zip(answer.values.to_pylist(), counts, strict=True)), answer.nulls
    return answer.tolist() if isinstance(answer, np.ndarray) else answer


@settings(max_examples=60, deadline=None)
@given(floats, st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(0, 60))
def test_what_is_counted_by_value_is_what_rows_would_give(
    entries: list[float], places: list[int], cut: int
) -> None:
    column = coded(entries, places)
    numbers = Numbers(column="x", kind="float").after(FittedFillMedian(0.5))
    half = int(np.float32(1.5).view(np.uint32)) >> 16
    requests: list[Aggregate] = [
        HighBits(numbers), LowBits(numbers, half), ExactSums(numbers), NumberCounts(numbers),
    ]  # fmt: skip
    for request in requests:
        expected = request.measure(Sample(columns={"x": plain(column)}))
        parts = [
            measure_sample(request, Sample(columns={"x": part})) for part in (column[:cut], column[cut:])
        ]
        assert all(isinstance(part, Counted) for part in parts)
        for left, right in (parts, parts[::-1], (answer_counted(request, parts[0]), parts[1])):
            merged = answer_counted(request, merge_answers(request, left, right))
            assert comparable(merged) == comparable(expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.just(INT64_NULL), st.integers(-20, 20)), min_size=1), st.integers(1, 30))
def test_small_whole_numbers_are_counted_as_they_stand(numbers: list[int], times: int) -> None:
    values = np.tile(np.asarray(numbers, np.int64), 4 * times)
    column = compact(Column(kind="int", values=values))
    assert np.array_equal(column.values, values)
    assert np.array_equal(column.null, values == INT64_NULL)
    request = ValueCounts("x")
    found = answer_counted(request, measure_sample(request, Sample(columns={"x": column})))
    expected = request.measure(Sample(columns={"x": Column(kind="int", values=values)}))
    assert comparable(found) == comparable(expected)


@pytest.mark.parametrize(
    "values",
    [
        np.asarray([], np.int64),
        np.full(100, INT64_NULL),
        np.asarray([0, 2**40] * 50),
        np.asarray([INT64_NULL + 1, 2**63 - 1] * 50),
        np.arange(100),
    ],
)
def test_whole_numbers_far_apart_stay_as_they_are(values: npt.NDArray[np.int64]) -> None:
    column = Column(kind="int", values=values)
    assert compact(column) is column


def test_many_different_values_are_measured_instead() -> None:
    many = np.arange(MOST // 2 + 10, dtype=np.float32)
    ones = np.ones(len(many), np.int64)
    parts = [Counted(Column(kind="float", values=many + shift), ones) for shift in (0.0, 2.0**22)]
    assert len(add_counted([parts[0], parts[0]]).counts) == len(many)
    request = HighBits(Numbers(column="x", kind="float"))
    merged = merge_answers(request, *parts)
    assert not isinstance(merged, Counted)
    assert merged.sum() == 2 * len(many)


def test_columns_of_a_table_share_their_places_through_cuts_and_a_trip() -> None:
    table = {
        "a": Column(kind="float", values=np.asarray([1.0, 2.0, np.nan], np.float32)),
        "b": Column(kind="int", values=np.asarray([10, 20, 30])),
        "c": column_from_arrow(pa.array(["x", "y", None]), "string"),
    }
    found = np.asarray([0, 2, -1, 1, 0, 2, 1, 1])
    looked = look_up(table, found)
    expected = {name: column.take_or_null(found) for name, column in table.items()}
    cut = take(looked, np.asarray([7, 2, 1, 0]))
    sent = pickle.loads(pickle.dumps(cut))
    for columns, rows in ((looked, slice(None)), (cut, [7, 2, 1, 0]), (sent, [7, 2, 1, 0])):
        first, second = columns["a"], columns["b"]
        assert isinstance(first, CodedColumn)
        assert isinstance(second, CodedColumn)
        assert first.places is second.places
        for name, column in columns.items():
            assert np.array_equal(
                column.values, expected[name].values[rows], equal_nan=column.kind == "float"
            )
            assert np.array_equal(column.null, expected[name].null[rows])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(-(2**63) + 1, 2**62),
    st.sampled_from([1, 7, 60_000_000, 3_600_000_000]),
    st.sets(st.integers(0, 500), min_size=1),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
)
def test_a_key_on_a_grid_is_found_where_a_hash_finds_it(
    low: int, step: int, places: set[int], others: list[int]
) -> None:
    known = low + step * np.asarray(sorted(places, key=hash), np.int64)
    grid = Grid.of(pa.array(known))
    assert grid is not None
    asked = np.concatenate([known, known + 1, np.asarray([INT64_NULL, *others], np.int64)])
    where = {value: place for place, value in enumerate(known.tolist())}
    assert grid.places(asked).tolist() == [where.get(value, -1) for value in asked.tolist()]


def test_keys_far_apart_are_found_by_their_hash() -> None:
    key = Column(kind="int", values=np.asarray([5, 2**50 + 3, -7]))
    assert Grid.of(pa.array(key.values)) is None
    asked = Column(kind="int", values=np.asarray([-7, 6, 2**50 + 3, INT64_NULL]))
    assert KeyIndex([key]).find([asked]).tolist() == [2, -1, 1, -1]
