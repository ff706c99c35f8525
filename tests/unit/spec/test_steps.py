"""Which chains of steps the spec takes, and what it says to the others."""

from typing import Any

import pytest
from pydantic import ValidationError

from serin.spec.features import FeatureSpec
from serin.spec.steps.operators import operators
from serin.spec.steps.parse import dump_step, parse_step

OWN = "tests.fakes.own_operators"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["fill_medain"], "did you mean 'fill_median'"),
        (["onehot"], "did you mean 'one_hot'"),
        (["categorify", "normalize"], "categorify makes codes, and normalize needs"),
        (["normalize", "categorify"], "normalize makes numbers, and categorify needs the column itself"),
        (["one_hot", "normalize"], "nothing can follow one_hot"),
        (["fill_median", "clip", "fill_mode"], "q: "),
        (["fill_median", "normalize", "fill_mode"], "nothing is null after fill_median; take fill_mode out"),
        (["log1p", {"bucketize": [1, 2]}], "take log1p out"),
        ([{"bucketize": [2, 1]}], "must increase"),
        (
            [{"fill_median": {"indicator": True}}, {"group_stats": {"by": "k"}}],
            "an indicator describes the column",
        ),
        (["log1p", {"cyclical": {"period": 3}}], "cyclical after log1p"),
        (
            ["normalize", {"cyclical": ["hour"]}],
            "normalize makes numbers, and cyclical needs the column itself",
        ),
        (["bucketize"], "give either edges"),
        ([{"cyclical": {"parts": ["hour"], "period": 3}}], "give either parts"),
        ([{"ordinal": ["a", 1]}], "mixes strings and numbers"),
        ([{"clip": {"min": float("inf")}}], "not a finite float32"),
        ([{"target_encode": {"folds": 1}}], "greater than or equal to 2"),
        (["no_such_module:Class"], "cannot be imported: No module named 'no_such_module'"),
        ([f"{OWN}:Nothing"], "has no 'Nothing'"),
        ([f"{OWN}:np"], "is not a class"),
        (["decimal:Decimal"], "lacks transform"),
        ([{f"{OWN}:Known": {"wrong": 1}}], "does not take these arguments"),
        ([f"{OWN}:Squash", {"categorify": {}}], "makes numbers, and categorify needs"),
    ],
)
def test_nonsense_is_refused_with_what_to_do(steps: list[Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        FeatureSpec(columns=["x"], steps=steps)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("step", "written"),
    [
        ("normalize", "normalize"),
        ({"fill_missing": 3}, {"fill_missing": {"value": 3.0}}),
        ({"bucketize": [1, 2]}, {"bucketize": {"edges": [1.0, 2.0]}}),
        (f"{OWN}:Squash", f"{OWN}:Squash"),
        ({f"{OWN}:AboveMost": {"few": 2}}, {f"{OWN}:AboveMost": {"few": 2}}),
    ],
)
def test_a_step_is_written_back_as_it_can_be_read(step: Any, written: Any) -> None:
    assert dump_step(parse_step(step)) == written
    assert parse_step(written) == parse_step(step)


def test_a_feature_says_what_it_makes_and_what_it_needs() -> None:
    stats = {"group_stats": {"by": "k", "stats": ["mean", "max"]}}
    feature = FeatureSpec(columns=["x"], steps=["fill_median", stats, {"fill_missing": 0}])
    assert (feature.inputs, feature.served) == (("x", "k"), ("k",))
    assert [name for _, name in feature.outputs("x")] == ["x_mean_by_k", "x_max_by_k"]
    marked = FeatureSpec(columns=["x"], steps=[{"fill_mode": {"indicator": True}}, {"bucketize": [1]}])
    assert marked.outputs("x") == (("categorical", "x"), ("numeric", "x_missing"))


def test_every_step_is_documented() -> None:
    assert all(step.__doc__ for step in operators().values())
