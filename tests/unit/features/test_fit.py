import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.errors import DataError
from serin.features.ops.clip import FittedClip
from serin.features.ops.fill_median import FittedFillMedian
from serin.features.ops.normalize import FittedNormalize
from serin.features.sample import Sample
from serin.formats.schema import INT64_NULL, Kind
from serin.spec.features import FeatureSpec
from tests.unit.features.measured import columns_of, fit

KINDS: dict[str, Kind] = {"f": "float", "s": "string", "i": "int"}
CHAIN = ["fill_median", {"clip": {"q": [0.05, 0.95]}}, "normalize"]
FEATURES = [
    FeatureSpec(columns=["f", "i"], steps=CHAIN),
    FeatureSpec(columns=["s", "i"], steps=[{"categorify": {"min_count": 2}}]),
]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 300), st.integers(1, 9))
def test_fitted_numbers_do_not_depend_on_how_rows_are_cut(seed: int, count: int, pieces: int) -> None:
    rng = np.random.default_rng(seed)
    table = {
        "f": (rng.standard_cauchy(count) * 10.0 ** rng.integers(-6, 6, count)).astype(np.float32),
        "s": rng.choice(np.asarray(["", "a", "bb", "c", "ä"], object), count),
        "i": np.where(rng.random(count) < 0.2, INT64_NULL, rng.integers(-30, 30, count)),
    }
    table["f"][rng.random(count) < 0.2] = np.nan
    table["f"][0], table["i"][0] = 1, 1
    whole = fit(FEATURES, KINDS, columns_of(table, KINDS))
    cuts = np.array_split(rng.permutation(count), pieces)
    parts = [columns_of({name: values[cut] for name, values in table.items()}, KINDS) for cut in cuts]
    assert fit(FEATURES, KINDS, *parts).to_json() == whole.to_json()


@pytest.mark.parametrize("nulls", [0.0, 0.3])
def test_a_chain_is_fitted_on_what_the_steps_before_it_made(nulls: float) -> None:
    rng = np.random.default_rng(5)
    values = (rng.normal(3, 50, 20_001)).astype(np.float32)
    values[rng.random(len(values)) < nulls] = np.nan
    (feature,) = fit(
        [FeatureSpec(columns=["f"], steps=CHAIN)], KINDS, columns_of({"f": values}, KINDS)
    ).numbers
    fill, clip, normalize = feature.numbers.steps
    median = np.quantile(values[~np.isnan(values)], 0.5, method="lower")
    filled = np.where(np.isnan(values), median, values)
    low, high = np.quantile(filled, 0.05, method="lower"), np.quantile(filled, 0.95, method="lower")
    clipped = np.clip(filled, low, high).astype(np.float64)
    assert fill == FittedFillMedian(float(median))
    assert clip == FittedClip(float(low), float(high))
    assert isinstance(normalize, FittedNormalize)
    assert math.isclose(normalize.shift, clipped.mean(), rel_tol=1e-6)
    assert math.isclose(normalize.scale, clipped.std(), rel_tol=1e-6)


def test_a_quantile_clip_after_normalize_sees_normalized_values() -> None:
    values = np.arange(101, dtype=np.float32)
    steps = ["normalize", {"clip": {"q": [0.1, 0.9]}}]
    (feature,) = fit(
        [FeatureSpec(columns=["f"], steps=steps)], KINDS, columns_of({"f": values}, KINDS)
    ).numbers
    made = feature.numbers.of(Sample(columns=columns_of({"f": values}, KINDS)))
    assert made.min() == made[10]
    assert made.max() == made[90]


def test_a_constant_column_normalizes_to_zero() -> None:
    values = np.full(10, 7, np.float32)
    (feature,) = fit(
        [FeatureSpec(columns=["f"], steps=["normalize"])], KINDS, columns_of({"f": values}, KINDS)
    ).numbers
    assert np.array_equal(feature.numbers.of(Sample(columns=columns_of({"f": values}, KINDS))), np.zeros(10))


def test_infinite_values_take_no_part_in_a_fit() -> None:
    values = np.asarray([1, 2, 3, np.inf, -np.inf, np.nan], np.float32)
    (feature,) = fit(
        [FeatureSpec(columns=["f"], steps=["fill_median"])], KINDS, columns_of({"f": values}, KINDS)
    ).numbers
    assert feature.numbers.steps == (FittedFillMedian(2.0),)


def test_a_column_without_a_value_in_training_is_refused_by_name() -> None:
    values = np.full(4, np.nan, np.float32)
    with pytest.raises(DataError, match="'f' has no value in the training split"):
        fit([FeatureSpec(columns=["f"], steps=["fill_median"])], KINDS, columns_of({"f": values}, KINDS))
