"""Sums and means over windows: the correctly rounded ones, of the rows in the window alone."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.columns.column import Column
from serin.errors import DataError
from serin.etl.relational.across_pieces.windows import look_back
from serin.formats.schema import INT64_NULL
from serin.spec.relation import WindowSpec
from tests.unit.features.exact_tables import finite, integers, nearest

CALLS = {"sum_f": "sum(f)", "mean_f": "mean(f)", "mean_i": "mean(i)", "sum_i": "sum(i)"}
rows = st.tuples(
    st.integers(0, 2),
    st.integers(0, 20),
    st.one_of(finite, finite, st.sampled_from([np.nan, np.inf])),
    st.one_of(integers, st.just(INT64_NULL)),
)


def windows(table: list[Any], calls: dict[str, str], last: int | None = None) -> dict[str, Any]:
    keys, times, f, i = zip(*table, strict=True)
    columns = {
        "key": Column(kind="int", values=np.asarray(keys, np.int64)),
        "f": Column(kind="float", values=np.asarray(f, np.float32)),
        "i": Column(kind="int", values=np.asarray(i, np.int64)),
    }
    made = look_back(WindowSpec(by=("key",), rows=last, make=calls), columns, np.asarray(times, np.int64))
    return {name: column.values for name, column in made.items()}


def past_of(table: list[Any], row: int, place: int, last: int | None) -> list[Fraction]:
    order = sorted(range(len(table)), key=lambda other: (table[other][1], other))
    past = [each for each in order if table[each][0] == table[row][0] and table[each][1] < table[row][1]]
    values = [table[each][place] for each in past[len(past) - last if last and last < len(past) else 0 :]]
    return [Fraction(value) for value in values if value != INT64_NULL and np.isfinite(value)]


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=30), st.sampled_from([None, 1, 3]))
def test_sums_over_windows_are_the_correctly_rounded_exact_ones(table: list[Any], last: int | None) -> None:
    floats = {name: call for name, call in CALLS.items() if name != "sum_i"}
    made = windows(table, floats, last)
    for row in range(len(table)):
        for name in floats:
            values = past_of(table, row, 2 if name.endswith("f") else 3, last)
            if not values:
                assert np.isnan(made[name][row])
                continue
            exact = sum(values) / (len(values) if name.startswith("mean") else 1)
            assert made[name][row] == nearest(exact), (row, name)
    sums = [past_of(table, row, 3, last) for row in range(len(table))]
    if all(abs(sum(values)) < 2**63 for values in sums):
        expected = [int(sum(values)) if values else INT64_NULL for values in sums]
        assert windows(table, {"sum_i": "sum(i)"}, last)["sum_i"].tolist() == expected
    else:
        with pytest.raises(DataError, match="does not fit in 64 bits; use mean"):
            windows(table, {"sum_i": "sum(i)"}, last)


def test_one_outlier_changes_only_the_windows_that_hold_it() -> None:
    draw = np.random.default_rng(3)
    amounts = (draw.integers(1, 10_000, 2_000) / 100).astype(np.float32)
    table = [(row % 7, row, float(amount), row) for row, amount in enumerate(amounts)]
    usual = windows(table, CALLS, 5)
    table[1_500] = (1_500 % 7, 1_500, 1e12, 2**62)
    changed = windows(table, CALLS, 5)
    hit = [row for row in range(2_000) if row % 7 == 1_500 % 7 and 0 < (row - 1_500) // 7 <= 5]
    for name in CALLS:
        apart = np.flatnonzero(
            ~np.equal(usual[name], changed[name]) & ~np.isnan(usual[name].astype(np.float64))
        )
        assert apart.tolist() == hit, name


@pytest.mark.parametrize("values", [[2**62, 2**62], [-(2**62), -(2**62)], [INT64_NULL + 1] * 2])
def test_a_sum_of_integers_beyond_64_bits_is_refused(values: list[int]) -> None:
    table = [(0, row, 0.0, value) for row, value in enumerate([*values, 0])]
    with pytest.raises(DataError, match="window column 'total': a sum of 'i' does not fit in 64 bits"):
        windows(table, {"total": "sum(i)"})
    assert windows(table, {"mean": "mean(i)"})["mean"][-1] == np.float32(values[0])
