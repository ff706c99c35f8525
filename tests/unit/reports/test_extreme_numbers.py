"""Numbers of any size can be read in the data report: short, exact to their digits, in order. Ids are shown as ids."""

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serin.columns.column import Column, column_from_arrow
from serin.etl.dataset.relate_target import relate_to_target
from serin.etl.dataset.train_sample import TrainSample
from serin.formats.statistics import ColumnStatistics, NumberStatistics
from serin.reports.charts import histogram, moment, number, percent
from serin.reports.data_report import Bins, _identity, _numbers

UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
FINITE = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True)


def read_back(text: str) -> float:
    return float(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else float(text)


@given(FINITE)
@example(999_999.0)
@example(999.9999)
@example(-9_999.6)
@example(9.007199254740993e15)
@example(1.7976931348623157e308)
@example(5e-324)
@example(-0.0)
def test_a_number_is_short_and_means_what_it_stands_for_to_three_digits(value: float) -> None:
    text = number(value)
    assert len(text) <= 10
    assert re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+|[kMGT])?", text), text
    assert read_back(text) == pytest.approx(value, rel=0.00501, abs=5e-324)


@given(st.lists(FINITE, min_size=2, max_size=20))
def test_labels_are_in_the_order_of_their_numbers(values: list[float]) -> None:
    labels = [read_back(number(value)) for value in sorted(values)]
    assert labels == sorted(labels)


def bins_of(values: Any, target: Any = None) -> tuple[Bins, NumberStatistics]:
    """A column of numbers in the report's bins, with edges at its own values."""
    numbers = np.asarray(values, np.float64)
    edges = np.unique(numbers)
    edges = (
        np.append(edges, np.nextafter(edges[-1], np.inf)) if edges[-1] < np.finfo(np.float64).max else edges
    )
    edges = edges if len(edges) > 1 else np.asarray([np.nextafter(edges[0], -np.inf), edges[0]])
    counts = tuple(int(each) for each in np.histogram(numbers, edges)[0])
    known = NumberStatistics(
        kind="float", rows=len(numbers), nulls=0, edges=tuple(edges.tolist()), counts=counts
    )
    columns = {"x": Column(kind="float", values=numbers)}
    truth = np.arange(len(numbers)) % 2 if target is None else np.asarray(target)
    sample = TrainSample(columns=columns, target=truth.astype(np.float32), share=1.0)
    label = 1 if target is None else None
    (bins,) = relate_to_target(sample, {"x": known}, {}, label).values()
    return bins, known


@pytest.mark.filterwarnings("error")
@given(st.lists(FINITE, min_size=1, max_size=12))
@example([5e-324, 0.0])
@example([1.7976931348623157e308, -1.7976931348623157e308])
@example([1e308, 1e308])
@example([2.0**53, 2.0**53 + 2, 2.0**63])
def test_a_histogram_of_any_numbers_has_finite_shapes_and_an_axis_in_order(values: list[float]) -> None:
    bins, known = bins_of(values)
    chart, extent = _numbers(bins, known, 0.5, percent)
    assert not re.search("nan|inf", chart + extent)
    low, high = re.findall(r'y="128\.0"[^>]*>([^<]+)<', chart)
    assert read_back(low) <= read_back(high)


@pytest.mark.filterwarnings("error")
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=8))
def test_a_target_of_any_size_has_an_axis_in_order(target: list[float]) -> None:
    bins, known = bins_of(np.arange(len(target)) * 1.5, target)
    assert 0 <= bins.explained() <= 1
    mean = float(np.mean(target, dtype=np.float64))
    chart, _ = _numbers(bins, known, mean, number)
    assert not re.search("nan|inf", chart)
    shown = [read_back(each) for each in re.findall(r'fill="var\(--line\)">([^<]+)<', chart)]
    assert shown == sorted(shown)
    assert 1 <= len(shown) <= 2


def test_a_share_that_is_the_same_everywhere_is_written_once() -> None:
    line = [(0.1, 0.003), (0.9, 0.003)]
    chart = histogram(np.ones(4), ("1", "2"), line, 0.003, percent).embedded("shares")
    assert re.findall(r">([^<]*%)<", chart) == ["0.3%"]


def test_the_first_and_last_moments_of_64_bits_have_a_day() -> None:
    assert moment(2.0**63).startswith("2942")
    assert moment(-(2.0**63)).startswith("-2903")


@pytest.mark.parametrize(
    ("values", "is_id"),
    [
        (np.arange(2**53 + 1, 2**53 + 300), True),
        (np.random.default_rng(1).permutation(5000), True),
        (np.random.default_rng(1).permutation(500), False),
        (np.arange(5000) // 2, False),
        (np.asarray([f"k{row}" for row in range(1200)], object), True),
    ],
)
def test_an_id_is_shown_by_examples_instead_of_a_distribution(values: Any, is_id: bool) -> None:
    column = column_from_arrow(pa.array(values), "string" if values.dtype == object else "int")
    edges = (0.0, 1e16)
    known: ColumnStatistics = NumberStatistics(
        kind=column.kind, rows=len(values), nulls=0, edges=edges, counts=(len(values),)
    )
    sample = TrainSample(columns={"x": column}, target=np.zeros(len(values), np.float32), share=1.0)
    (bins,) = relate_to_target(sample, {"x": known}, {}, 1).values()
    assert bool(bins.examples) is is_id
    if is_id:
        page = _identity(bins, 1.0)
        assert f"<code>{values[0]}</code>" in page
        assert f"every one of {len(values):,} rows" in page
        assert bins.explained() == 0
