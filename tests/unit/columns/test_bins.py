"""Bins: the same value is in the same bin whatever its Arrow type, and every row is in exactly one."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from serin.columns.bins import bin_codes, count_rows, encode_hashes
from serin.errors import BundleBroken
from serin.formats.drift import FILE, BinnedColumn, DriftStatistics, Segment, read_drift
from tests.fakes.drift import category_column, series_of, statistics_of

NUMBER = BinnedColumn(name="x", field="x", source="request", kind="number", edges=(0.0, 1.0, 2.0, 5.0))


def codes(column: BinnedColumn, values: pa.Array) -> list[int]:
    found = bin_codes(column, pa.table({column.field: values}))
    assert found is not None
    return [int(code) for code in found]


def test_numbers_fall_between_edges_below_above_or_into_null() -> None:
    values = [0, 0.5, 1, 2, 5, 5.1, -0.1, None, float("nan"), float("inf"), float("-inf")]
    assert codes(NUMBER, pa.array(values, pa.float32())) == [0, 0, 1, 2, 2, 4, 3, 5, 5, 4, 3]
    assert NUMBER.labels == ("0 to 1", "1 to 2", "2 to 5", "below 0", "above 5", "null")


@pytest.mark.parametrize("kind", [pa.int64(), pa.int8(), pa.float64(), pa.float32(), pa.float16()])
def test_a_number_is_in_the_same_bin_in_every_type(kind: pa.DataType) -> None:
    assert codes(NUMBER, pa.array([0, 1, 2, 5, 6, None]).cast(kind)) == [0, 1, 2, 2, 4, 5]


def test_a_constant_column_has_one_inner_bin() -> None:
    column = BinnedColumn(name="x", field="x", source="request", kind="number", edges=(3.0,))
    assert codes(column, pa.array([3.0, 2.0, 4.0, None])) == [0, 1, 2, 3]
    assert (column.bins, column.labels) == (4, ("3", "below 3", "above 3", "null"))


def test_categories_are_frequent_known_unseen_or_null() -> None:
    column = BinnedColumn(
        name="c", field="c", source="request", kind="category", categories=("AA", "B6"),
        known=encode_hashes(pa.array(["UA", "DL"])),
    )  # fmt: skip
    values = pa.array(["AA", "B6", "UA", "DL", "XX", None, ""])
    assert codes(column, values) == codes(column, values.dictionary_encode()) == [0, 1, 2, 2, 3, 4, 4]


def test_without_hashes_every_other_value_counts_as_the_rest() -> None:
    column = BinnedColumn(
        name="c", field="c", source="request", kind="category", categories=("AA",), known=None
    )
    assert codes(column, pa.array(["AA", "ZZ", None])) == [0, 1, 3]


def test_integers_and_booleans_are_categories_by_their_text() -> None:
    column = category_column("c", ["1", "2"])
    assert codes(column, pa.array([1, 2, 3, None])) == [0, 1, 3, 4]
    assert codes(column, pa.array([1.0, 2.0, 3.0, None])) == [0, 1, 3, 4]
    assert codes(category_column("c", ["true", "false"]), pa.array([True, False, None])) == [0, 1, 4]


def test_timestamps_fall_into_hours_of_the_day() -> None:
    column = BinnedColumn(name="t", field="t", source="request", kind="timestamp")
    moments = [
        dt.datetime(2013, 1, 1, 5, 59, tzinfo=dt.UTC),
        dt.datetime(2020, 7, 1, 23, tzinfo=dt.UTC),
        None,
    ]
    assert codes(column, pa.array(moments, pa.timestamp("us", tz="UTC"))) == [5, 23, 24]


def test_an_element_of_a_list_is_a_column() -> None:
    column = BinnedColumn(
        name="p", field="p", source="score", kind="number", element=1, edges=(0.0, 0.5, 1.0)
    )
    assert codes(column, pa.array([[0.9, 0.1], [0.2, 0.8], None])) == [0, 1, 4]


def test_a_table_without_the_column_counts_nothing() -> None:
    statistics = statistics_of([category_column("c", "ab")], [series_of(0, (0.5, 0.5, 0, 0, 0))])
    found = count_rows(statistics, pa.table({"d": [1, 2]}), np.array([0.0, 61.0]))
    assert (found.starts.tolist(), found.counts.sum()) == ([0, 60], 0)


def test_rows_are_counted_by_ten_seconds_and_segment() -> None:
    share = (0.5, 0.5, 0.0, 0.0, 0.0)
    statistics = statistics_of(
        [category_column("c", "ab"), category_column("s", "xy")],
        [
            series_of(0, share),
            series_of(0, share, segment=Segment(column=1, category=1)),
            series_of(1, share),
        ],
    )
    table = pa.table({"c": ["a", "b", "a", "z"], "s": ["x", "y", "y", None]})
    found = count_rows(statistics, table, np.array([125.0, 0.0, 9.0, 129.9]))
    assert found.starts.tolist() == [0, 120]
    assert found.counts.tolist() == [
        [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 2, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1],
    ]


def test_statistics_without_floors_keep_their_digest() -> None:
    plain = statistics_of([category_column("c", "ab")], [series_of(0, (0.5, 0.5, 0, 0, 0))]).to_json()
    for name in ("floor", "floored", "block_rows", "quick"):
        del plain["series"][0][name]
    assert DriftStatistics.from_json(plain).to_json() == plain


def test_statistics_survive_their_file(tmp_path: Path) -> None:
    statistics = statistics_of(
        [category_column("c", "ab"), NUMBER],
        [
            series_of(0, (0.5, 0.5, 0, 0, 0), weight=0.5),
            series_of(1, (1.0, 0, 0, 0, 0, 0), weight=0.5, segment=Segment(column=0, category=1)),
        ],
    )
    (tmp_path / FILE).write_text(json.dumps(statistics.to_json()))
    read = read_drift(tmp_path)
    assert isinstance(read, DriftStatistics)
    assert (read, read.digest()) == (statistics, statistics.digest())
    assert read.segment_name(Segment(column=0, category=1)) == "c=b"


def test_a_bundle_may_have_no_statistics_but_not_broken_ones(tmp_path: Path) -> None:
    assert read_drift(tmp_path) is None
    (tmp_path / FILE).write_text('{"format": "serin.drift", "version": 1}')
    with pytest.raises(BundleBroken, match=r"drift\.json"):
        read_drift(tmp_path)
