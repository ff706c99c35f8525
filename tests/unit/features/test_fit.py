"""Fits and plans, and what must hold for every table and every chain of steps that the spec allows."""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.columns.exact import alike
from serin.errors import DataError, SpecError
from serin.etl.binding.layout import check_kinds
from serin.features.fitted import Sample
from serin.features.ops.clip import FittedClip
from serin.features.ops.fill import FittedFillMedian
from serin.features.ops.scale import FittedNormalize
from serin.features.plan import FeaturePlan
from serin.formats.schema import Kind
from serin.spec.features import FeatureSpec
from tests.unit.features.measured import Columns, answer_over, columns_of, fit, run_graph, same_bits
from tests.unit.features.random_tables import KINDS, examples, features, tables, wire, with_values

FIT_KINDS: dict[str, Kind] = {"f": "float", "s": "string", "i": "int"}
CHAIN = ["fill_median", {"clip": {"q": [0.05, 0.95]}}, "normalize"]
FEATURES = [
    FeatureSpec(columns=["f", "i"], steps=CHAIN),
    FeatureSpec(columns=["s", "i"], steps=[{"categorify": {"min_count": 2}}]),
]


@pytest.mark.parametrize("nulls", [0.0, 0.3])
def test_a_chain_is_fitted_on_what_the_steps_before_it_made(nulls: float) -> None:
    rng = np.random.default_rng(5)
    values = (rng.normal(3, 50, 20_001)).astype(np.float32)
    values[rng.random(len(values)) < nulls] = np.nan
    (feature,) = fit(
        [FeatureSpec(columns=["f"], steps=CHAIN)], FIT_KINDS, columns_of({"f": values}, FIT_KINDS)
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
        [FeatureSpec(columns=["f"], steps=steps)], FIT_KINDS, columns_of({"f": values}, FIT_KINDS)
    ).numbers
    made = feature.numbers.of(Sample(columns=columns_of({"f": values}, FIT_KINDS)))
    assert made.min() == made[10]
    assert made.max() == made[90]


def test_a_constant_column_normalizes_to_zero() -> None:
    values = np.full(10, 7, np.float32)
    (feature,) = fit(
        [FeatureSpec(columns=["f"], steps=["normalize"])], FIT_KINDS, columns_of({"f": values}, FIT_KINDS)
    ).numbers
    assert np.array_equal(
        feature.numbers.of(Sample(columns=columns_of({"f": values}, FIT_KINDS))), np.zeros(10)
    )


def test_infinite_values_take_no_part_in_a_fit() -> None:
    values = np.asarray([1, 2, 3, np.inf, -np.inf, np.nan], np.float32)
    (feature,) = fit(
        [FeatureSpec(columns=["f"], steps=["fill_median"])], FIT_KINDS, columns_of({"f": values}, FIT_KINDS)
    ).numbers
    assert feature.numbers.steps == (FittedFillMedian(2.0),)


def test_a_column_without_a_value_in_training_is_refused_by_name() -> None:
    values = np.full(4, np.nan, np.float32)
    with pytest.raises(DataError, match="'f' has no value in the training split"):
        fit(
            [FeatureSpec(columns=["f"], steps=["fill_median"])],
            FIT_KINDS,
            columns_of({"f": values}, FIT_KINDS),
        )


PLAN_KINDS: dict[str, Kind] = {"f": "float", "s": "string", "t": "timestamp"}
WIRE = {
    "f": np.asarray([1, np.nan, 3], np.float32),
    "s": np.asarray(["a", "", "b"], object),
    "t": np.asarray([0, 1, 2], np.int64),
}
NUMBER = FeatureSpec(columns=["f"], steps=["normalize"])
TEXT = FeatureSpec(columns=["s"], steps=["categorify"])
TIME = FeatureSpec(columns=["t"], steps=[{"date_parts": ["hour"]}])


@pytest.mark.parametrize("features", [[NUMBER], [TEXT]], ids=["no categories", "no numbers"])
def test_a_plan_may_make_one_kind_of_feature_only(features: list[FeatureSpec]) -> None:
    plan = fit(features, PLAN_KINDS, columns_of(WIRE, PLAN_KINDS))
    num, cat = run_graph(plan, WIRE)
    assert num.shape == (3, len(plan.numeric))
    assert cat.shape == (3, len(plan.categorical))


def test_steps_that_cannot_work_on_a_column_are_all_named() -> None:
    features = [
        FeatureSpec(columns=["s", "t"], steps=["fill_median"]),
        FeatureSpec(columns=["f"], steps=["categorify"]),
        FeatureSpec(columns=["s"], steps=["date_parts"]),
    ]
    with pytest.raises(SpecError) as caught:
        check_kinds(features, PLAN_KINDS)
    assert [key for key, _ in caught.value.fields["problems"]] == ["features[0]"] * 2 + [
        "features[1]",
        "features[2]",
    ]


def test_every_feature_is_described_in_a_line() -> None:
    lines = fit([NUMBER, TEXT], PLAN_KINDS, columns_of(WIRE, PLAN_KINDS)).describe()
    assert lines[0].startswith("f (numeric): minus 2, divided by 1")
    assert lines[0].endswith("null becomes 0")
    assert lines[1].startswith("s (categorical): 2 values")


def test_a_document_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"serin\.features"):
        FeaturePlan.from_json({"format": "other", "version": 1})


def fitted(specs: Any, pieces: list[Columns], cuts: list[Any], targets: Any, classes: int) -> FeaturePlan:
    answer = answer_over(pieces, cuts, [targets[cut] for cut in cuts])
    return FeaturePlan.fit(specs, KINDS, answer, classes=classes)


def target_of(count: int, classes: int) -> Any:
    random = np.random.default_rng(count)
    if classes:
        return random.integers(0, classes, count).astype(np.float32)
    return (random.standard_cauchy(count) * 1000).astype(np.float32)


@settings(max_examples=examples(60), deadline=None)
@given(tables, tables, features, st.sampled_from([0, 3]))
def test_a_request_becomes_the_same_features_in_arrays_and_in_the_graph(
    training: Any, requests: Any, specs: Any, classes: int
) -> None:
    table = with_values(training)
    with np.errstate(all="ignore"):
        columns = columns_of(wire(table), KINDS)
        ids = np.arange(len(table))
        plan = fitted(specs, [columns], [ids], target_of(len(table), classes), classes)
        asked = wire(table + requests)
        num, cat = plan.transform(columns_of(asked, KINDS))
        graph_num, graph_cat = run_graph(plan, asked)
        again = FeaturePlan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
        num_again, cat_again = again.transform(columns_of(asked, KINDS))
    assert graph_num.shape == num.shape
    for place, name in enumerate(plan.numeric):
        ours, theirs = np.ascontiguousarray(num[:, place]), np.ascontiguousarray(graph_num[:, place])
        if name in plan.approximate:
            assert alike(ours, theirs, plan.approximate[name]).all(), (name, plan.describe())
        else:
            assert same_bits(ours, theirs), (name, plan.describe())
    assert np.array_equal(cat, graph_cat)
    assert (cat < [output.size for output in plan.categorical]).all()
    assert (cat >= 0).all()
    assert not np.isnan(num).any()
    assert same_bits(num, num_again)
    assert same_bits(cat, cat_again)
    assert again.to_json() == plan.to_json()


@settings(max_examples=examples(40), deadline=None)
@given(tables, features, st.sampled_from([0, 3]), st.lists(st.integers(0, 61), max_size=6))
def test_how_rows_are_cut_never_shows(training: Any, specs: Any, classes: int, places: list[int]) -> None:
    table = with_values(training)
    targets = target_of(len(table), classes)
    ends = sorted({0, len(table), *(min(place, len(table)) for place in places)})
    cuts = [np.arange(start, end) for start, end in pairwise(ends)]
    cuts.append(np.arange(0))  # a piece without a row
    with np.errstate(all="ignore"):
        columns = columns_of(wire(table), KINDS)
        whole = fitted(specs, [columns], [np.arange(len(table))], targets, classes)
        pieces = [columns_of(wire([table[row] for row in cut]), KINDS) for cut in cuts]
        parts = fitted(specs, pieces[::-1], cuts[::-1], targets, classes)
        num, cat = whole.transform(columns, np.arange(len(table)))
        made = [parts.transform(piece, cut) for piece, cut in zip(pieces, cuts, strict=True)]
    assert parts.to_json() == whole.to_json()
    assert same_bits(np.concatenate([own for own, _ in made]), num)
    assert same_bits(np.concatenate([own for _, own in made]), cat)
