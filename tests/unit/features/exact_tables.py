"""Tables of numbers of every magnitude, and what exact fractions say about the features fitted on them."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from serin.features.aggregates.exact_sums import folds_of
from serin.features.fitted import Sample
from serin.features.ops.encode import FittedTargetEncode
from serin.features.ops.group_stats import FittedGroupStats
from serin.features.ops.scale import FittedNormalize
from serin.features.plan import FeaturePlan
from serin.formats.schema import INT64_NULL, Kind
from serin.spec.features import FeatureSpec
from tests.unit.features.measured import columns_of

STATS = ("count", "sum", "mean", "std", "min", "max")
FOLDS, SMOOTHING = 3, 2.5
KINDS: dict[str, Kind] = {"f": "float", "i": "int", "s": "string"}
FEATURES = [
    FeatureSpec(columns=["f"], steps=["normalize"]),
    FeatureSpec(columns=["f", "i"], steps=[{"group_stats": {"by": "s", "stats": STATS}}]),
    FeatureSpec(columns=["s"], steps=[{"target_encode": {"folds": FOLDS, "smoothing": SMOOTHING}}]),
]
_LARGEST = Fraction(float(np.finfo(np.float32).max))
_ODD = [0.0, -0.0, 1e-45, -7e-45, 1.1754942e-38, 1e-38, -1e-38, 1e38, -1e38, 3.4028234e38, 1e12, 16777215.0]

finite = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from(_ODD).map(lambda value: float(np.float32(value))),
    st.integers(-9999, 9999).map(lambda cents: float(np.float32(cents / 100))),
)
integers = st.one_of(
    st.integers(INT64_NULL + 1, 2**63 - 1), st.integers(-50, 50), st.sampled_from([INT64_NULL + 1, 2**63 - 1])
)
_rows = st.tuples(
    st.one_of(finite, finite, st.sampled_from([math.nan, math.inf, -math.inf])),
    st.one_of(integers, integers, st.just(INT64_NULL)),
    st.sampled_from(["a", "b", ""]),
    finite,
)
tables = st.lists(_rows, min_size=1, max_size=40).map(lambda rows: [(1.0, 1, "a", 0.5), *rows])


def sample_of(table: Sequence[tuple[Any, ...]], rows: Sequence[int] | None = None) -> Sample:
    """These rows of the table; all of them, when none are named. They train."""
    chosen = np.arange(len(table)) if rows is None else np.asarray(rows, np.int64)
    f, i, s, y = zip(*table, strict=True)
    wire = {"f": np.asarray(f, np.float32), "i": np.asarray(i, np.int64), "s": np.asarray(s, object)}
    columns = columns_of({name: values[chosen] for name, values in wire.items()}, KINDS)
    target = np.asarray(y, np.float32)[chosen]
    return Sample(columns=columns, fold_ids=chosen, target=target, training=len(chosen))


def check_against_fractions(plan: FeaturePlan, table: Sequence[tuple[Any, ...]]) -> None:
    """Every number that was fitted is the float32 nearest to the exact one."""
    steps = [step for feature in plan.numbers for step in feature.numbers.steps]
    (normalize,) = (step for step in steps if isinstance(step, FittedNormalize))
    floats = [Fraction(row[0]) for row in table if math.isfinite(row[0])]
    assert normalize.shift == nearest(mean(floats))
    assert normalize.scale == (float(nearest_root(variance(floats))) or 1.0)
    encodings = {id(feature.numbers.encoding): feature.numbers.encoding for feature in plan.numbers}.values()
    for encoding in encodings:
        if isinstance(encoding, FittedGroupStats):
            _check_groups(encoding, table)
        elif isinstance(encoding, FittedTargetEncode):
            _check_targets(encoding, table)


def _check_groups(encoding: FittedGroupStats, table: Sequence[tuple[Any, ...]]) -> None:
    place = "fi".index(encoding.column)
    keys = encoding.table.keys.to_pylist()
    for key in ("a", "b"):
        own = [row[place] for row in table if row[2] == key]
        values = [Fraction(value) for value in own if math.isfinite(value) and value != INT64_NULL]
        if not values:
            assert key not in keys
            continue
        found = encoding.table.numbers[keys.index(key)]
        expected = [
            np.float32(len(values)),
            nearest(sum(values, Fraction(0))),
            nearest(mean(values)),
            nearest_root(variance(values)),
            nearest(min(values)),
            nearest(max(values)),
        ]
        assert found.tolist() == expected, (encoding.column, key)


def _check_targets(encoding: FittedTargetEncode, table: Sequence[tuple[Any, ...]]) -> None:
    folds = folds_of(np.arange(len(table)), FOLDS)
    assert encoding.out_of_fold is not None
    cases = [(encoding.table.numbers, list(range(len(table))))]
    cases += [(encoding.out_of_fold[fold], np.flatnonzero(folds != fold).tolist()) for fold in range(FOLDS)]
    keys = [*encoding.table.keys.to_pylist(), None, ""]  # no key; null
    for numbers, rows in cases:
        prior = mean([Fraction(table[row][3]) for row in rows])
        smoothing = Fraction(SMOOTHING)
        for found, key in zip(numbers[:, 0], keys, strict=True):
            own = [Fraction(table[row][3]) for row in rows if table[row][2] == key]
            expected = (sum(own, Fraction(0)) + prior * smoothing) / (len(own) + smoothing)
            assert found == nearest(expected), (key, found, float(expected))


def mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / max(len(values), 1)


def variance(values: Sequence[Fraction]) -> Fraction:
    middle = mean(values)
    return mean([(value - middle) ** 2 for value in values])


def nearest(exact: Fraction) -> np.float32:
    """By comparing with the neighbours; of two equally near ones the even one."""
    near = np.float32(float(max(-_LARGEST, min(_LARGEST, exact))))
    return min(_around(near), key=lambda value: (abs(_value(value) - exact), _odd(value)))


def nearest_root(exact: Fraction) -> np.float32:
    """Of the square root, by comparing squares: a root lies below a middle whose square is larger."""
    near = np.float32(math.isqrt(int(exact * 2**600)) / 2**300)
    for value in sorted(value for value in _around(near) if value >= 0):
        upper = (_value(value) + _value(_around(value)[-1])) / 2
        if exact < upper**2 or (exact == upper**2 and not _odd(value)):
            return np.float32(value)
    raise AssertionError(exact)


def _around(value: np.float32) -> list[np.float32]:
    with np.errstate(over="ignore"):
        return [np.nextafter(value, np.float32(-np.inf)), value, np.nextafter(value, np.float32(np.inf))]


def _value(value: np.float32) -> Fraction:
    """Infinity stands where the next float32 would be."""
    return Fraction(float(value)) if np.isfinite(value) else Fraction(2) ** 128 * int(np.sign(value))


def _odd(value: np.float32) -> int:
    return int(value.view(np.uint32)) & 1
