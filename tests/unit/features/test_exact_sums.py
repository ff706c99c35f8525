"""Fitted sums, means and deviations are the correctly rounded ones, whatever the magnitudes, the cut and the device."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serin.columns.column import Column
from serin.columns.exact import (
    Limb,
    Superaccumulator,
    limbs,
    nearest_ratio,
    nearest_ratios,
    nearest_root,
    square_limbs,
)
from serin.features.aggregates.aggregate import Aggregate, Answer
from serin.features.aggregates.exact_sums import ExactSums
from serin.features.fitted import Sample
from serin.features.numbers import Numbers
from serin.features.plan import FeaturePlan
from tests.fakes.cupy import install
from tests.unit.features.exact_tables import (
    FEATURES,
    KINDS,
    check_against_fractions,
    finite,
    integers,
    nearest,
    sample_of,
    tables,
)


def answer_in_any_order(pieces: list[Sample], draw: np.random.Generator) -> Answer:
    def merged(aggregate: Aggregate) -> Any:
        parts = [aggregate.measure(piece) for piece in pieces]
        while len(parts) > 1:
            left, right = (parts.pop(draw.integers(len(parts))) for _ in range(2))
            parts.append(aggregate.merge(left, right))
        return parts[0]

    return lambda aggregates: [merged(aggregate) for aggregate in aggregates]


@settings(max_examples=30, deadline=None)
@given(tables, st.integers(1, 6), st.integers(0, 2**32))
def test_what_is_fitted_is_the_correctly_rounded_exact_number(table: Any, cuts: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    pieces = [sample_of(table, rows) for rows in np.array_split(draw.permutation(len(table)), cuts)]
    plan = FeaturePlan.fit(FEATURES, KINDS, answer_in_any_order(pieces, draw))
    check_against_fractions(plan, table)


@settings(max_examples=15, deadline=None)
@given(tables)
def test_what_is_fitted_on_a_gpu_s_arrays_is_the_correctly_rounded_exact_number(table: Any) -> None:
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        cupy = install(patch)
        host = sample_of(table)
        columns = {
            name: Column(kind=column.kind, values=cupy.asarray(column.values), dictionary=column.dictionary)  # type: ignore[arg-type]
            for name, column in host.columns.items()
        }
        there = replace(host, columns=columns)
        plan = FeaturePlan.fit(FEATURES, KINDS, lambda asked: [each.measure(there) for each in asked])
    check_against_fractions(plan, table)


@settings(max_examples=50, deadline=None)
@given(st.lists(finite, min_size=1, max_size=50), st.integers(1, 400))
def test_long_columns_are_added_up_exactly(values: list[float], times: int) -> None:
    column = Column(kind="float", values=np.tile(np.asarray(values, np.float32), times))
    sums = ExactSums(Numbers(column="x", kind="float")).measure(Sample(columns={"x": column}))
    exact = [Fraction(value) for value in values]
    assert sums.count == times * len(values)
    assert Fraction(sums.total, 2**149) == times * sum(exact)
    assert Fraction(sums.squares, 2**298) == times * sum(value**2 for value in exact)


def added(parts: list[Limb], place: int) -> Fraction:
    return sum(
        (Fraction(int(part.digits[place])) * Fraction(2) ** part.exponent for part in parts), Fraction(0)
    )


def as_int64(parts: list[Limb]) -> list[Limb]:
    return [Limb(part.exponent, part.digits.astype(np.int64)) for part in parts]


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.lists(finite, min_size=1).map(lambda values: np.asarray(values, np.float32)),
        st.lists(integers, min_size=1).map(lambda values: np.asarray(values, np.int64)),
    ),
    st.data(),
)
def test_limbs_and_superaccumulators_hold_the_values_themselves(values: Any, data: st.DataObject) -> None:
    exact = [Fraction(value.item()) for value in values]
    for bits in (32, 50, 62):
        parts = limbs(values, most_bits=bits)
        assert [added(parts, place) for place in range(len(values))] == exact
    squares = square_limbs(values)
    assert [added(squares, place) for place in range(len(values))] == [value**2 for value in exact]
    counts = np.asarray(
        data.draw(st.lists(st.integers(1, 2**32 - 1), min_size=len(values), max_size=len(values)))
    )
    expected = [nearest(value / int(count)) for value, count in zip(exact, counts, strict=True)]
    for parts in (as_int64(limbs(values)), as_int64(limbs(values, most_bits=62))):
        assert nearest_ratios(parts, counts).tolist() == expected
    several = Superaccumulator.of(as_int64(limbs(values)), values.shape)
    unit = Fraction(2) ** several.exponent
    cut = len(values) // 2
    for total in (several.sum(0), several[:cut].sum(0) + several[cut:].sum(0)):
        assert int(total.integers(several.exponent)[()]) * unit == sum(exact)
    rest = several[0] - several.sum(0)
    assert int(rest.integers(several.exponent)[()]) * unit == exact[0] - sum(exact)
    apart = [
        abs(Fraction(about) - value) for about, value in zip(several.floats().tolist(), exact, strict=True)
    ]
    assert all(error <= abs(value) * Fraction(2) ** -50 for error, value in zip(apart, exact, strict=True))


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**80), 2**80), st.integers(1, 2**40), st.integers(-200, 100))
@example(2**24 + 1, 1, 0)  # in the middle of two, to the even one
@example(2**24 + 3, 1, 0)
@example((2**25 + 2) * 2**40 + 1, 2**41, 0)  # a hair above the middle
@example(2**25 - 1, 1, 103)  # half a step beyond the largest: infinite
@example(3, 2, -149)
@example(1, 2, -149)  # half of the smallest is 0
@example(2**40 + 1, 2**41, -149)
def test_a_ratio_and_a_root_are_rounded_once(numerator: int, denominator: int, exponent: int) -> None:
    exact = Fraction(numerator, denominator) * Fraction(2) ** exponent
    assert nearest_ratio(numerator, denominator, exponent) == nearest(exact)
    root = nearest_root(numerator**2, denominator**2, exponent)
    assert root == abs(nearest(exact))


def test_one_outlier_leaves_the_statistics_of_other_groups_as_they_are() -> None:
    amounts = [float(np.float32(cents / 100)) for cents in np.random.default_rng(1).integers(1, 10_000, 200)]
    table = [*((amount, 1, "a", amount) for amount in amounts), (2.0**40, 2**62, "b", 2.0**40)]
    plan = FeaturePlan.fit(FEATURES, KINDS, lambda asked: [each.measure(sample_of(table)) for each in asked])
    check_against_fractions(plan, table)
