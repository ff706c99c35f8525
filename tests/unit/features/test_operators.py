"""What each operator makes of a few values, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from serin.columns.hashing import hash_ints
from serin.errors import DataError
from serin.features.plan import FeaturePlan
from serin.formats.schema import Kind
from serin.spec.features import FeatureSpec
from tests.unit.features.measured import answer_over, columns_of

NAN = math.nan
KINDS: dict[str, Kind] = {"f": "float", "s": "string", "u": "string", "i": "int", "t": "timestamp"}
WIRE = {
    "f": np.asarray([1, NAN, 3, 3, 8], np.float32),
    "s": np.asarray(["a", "", "b", "a", "a"], object),
    "u": np.asarray(["b", "b", "b", "c", ""], object),
    "i": np.asarray([10, 20, 20, -(2**63), 5], np.int64),
    "t": np.asarray([0, 6, 12, 18, 24], np.int64) * 3_600_000_000,
}
TARGET = np.asarray([1, 0, 1, 0, 1], np.float32)


def plan_of(
    *steps: Any, columns: tuple[str, ...] = ("f",), target: Any = TARGET, classes: int = 0
) -> FeaturePlan:
    answer = answer_over([columns_of(WIRE, KINDS)], [np.arange(5)], [target])
    return FeaturePlan.fit([FeatureSpec(columns=columns, steps=steps)], KINDS, answer, classes=classes)


def made(*steps: Any, columns: tuple[str, ...] = ("f",)) -> dict[str, list[float]]:
    plan = plan_of(*steps, columns=columns)
    num, cat = plan.transform(columns_of(WIRE, KINDS))
    numbers = dict(zip(plan.numeric, num.T.tolist(), strict=True))
    return numbers | {each.name: cat[:, place].tolist() for place, each in enumerate(plan.categorical)}


def test_fills_put_a_value_where_there_is_none() -> None:
    assert made({"fill_missing": -1})["f"] == [1, -1, 3, 3, 8]
    assert made("fill_median")["f"] == [1, 3, 3, 3, 8]
    assert made("fill_mode")["f"] == [1, 3, 3, 3, 8]


@pytest.mark.parametrize("fill", ["fill_missing", "fill_median", "fill_mode"])
def test_an_indicator_remembers_what_was_filled(fill: str) -> None:
    assert made({fill: {"indicator": True}}, "normalize")["f_missing"] == [0, 1, 0, 0, 0]


def test_scalings() -> None:
    assert made("min_max")["f"] == pytest.approx([0, 0, 2 / 7, 2 / 7, 1])  # null becomes 0 at the end
    assert made("robust_scale", {"fill_missing": 9})["f"] == [-1, 9, 0, 0, 2.5]  # median 3, quartiles 1 and 3


def test_a_quantile_counts_filled_values_where_they_stand() -> None:
    low = made({"fill_missing": -6}, {"clip": {"q": [0.0, 0.5]}})["f"]
    assert low == [1, -6, 3, 3, 3]


def test_log1p_keeps_the_sign() -> None:
    assert made({"fill_missing": -3}, "log1p")["f"] == pytest.approx(
        [math.log(2), -math.log(4), math.log(4), math.log(4), math.log(9)]
    )


def test_buckets_begin_at_their_edges() -> None:
    assert made({"bucketize": [3, 8]})["f"] == [1, 0, 2, 2, 3]
    assert made({"bucketize": {"quantiles": 2}})["f"] == [1, 0, 2, 2, 2]


def test_buckets_may_become_columns() -> None:
    assert made({"bucketize": [3, 8]}, "one_hot") == {
        "f=..3": [1, 0, 0, 0, 0],
        "f=3..8": [0, 0, 1, 1, 0],
        "f=8..": [0, 0, 0, 0, 1],
    }


def test_a_joint_vocabulary_gives_a_value_the_same_code_in_every_column() -> None:
    codes = made({"categorify": {"joint": True}}, columns=("s", "u"))
    assert codes == {"s": [3, 0, 2, 3, 3], "u": [2, 2, 2, 4, 0]}  # b 4 times, a 3, c once


def test_ordinal_goes_by_the_given_order_or_by_value() -> None:
    assert made({"ordinal": ["b", "a"]}, {"fill_missing": -1}, columns=("s",))["s"] == [1, -1, 0, 1, 1]
    assert made("ordinal", {"fill_missing": -1}, columns=("i",))["i"] == [1, 2, 2, -1, 0]


def test_one_hot_has_a_column_per_value_and_one_for_others() -> None:
    assert made({"one_hot": {"max_size": 1}}, columns=("s",)) == {
        "s=<other>": [0, 0, 1, 0, 0],
        "s=a": [1, 0, 0, 1, 1],
    }


def test_one_hot_refuses_to_make_thousands_of_columns() -> None:
    with pytest.raises(DataError, match="would make 2,000 columns"):
        plan_of({"hash_bucket": 2000}, "one_hot", columns=("s",))


def test_hash_buckets_are_the_hash_and_null_is_0() -> None:
    expected = 1 + hash_ints(WIRE["i"]) % 4
    expected[3] = 0
    assert made({"hash_bucket": 4}, columns=("i",))["i"] == expected.tolist()


def test_counts_are_those_of_the_training_rows() -> None:
    assert made("count_encode", columns=("s",))["s_count"] == [3, 1, 1, 3, 3]


def test_group_stats_are_found_by_the_key_alone() -> None:
    plan = plan_of({"group_stats": {"by": "s", "stats": ["mean", "std", "min", "max", "sum", "count"]}})
    assert set(plan.columns) == {"s"}
    num, _ = plan.transform(columns_of({"s": np.asarray(["a", "b", "new", ""], object)}, KINDS))
    mean, std, low, high, total, count = num.T.tolist()
    assert plan.numeric[0] == "f_mean_by_s"
    assert (mean, low, high, total, count) == (
        [4, 3, 0, 0],
        [1, 3, 0, 0],
        [8, 3, 0, 0],
        [12, 3, 0, 0],
        [3, 1, 0, 0],
    )
    assert std[0] == pytest.approx(np.std([1, 3, 8]))


def test_cyclical_parts_end_where_they_began() -> None:
    turned = made({"cyclical": ["hour"]}, columns=("t",))
    assert turned["t_hour_sin"] == pytest.approx([0, 1, 0, -1, 0], abs=1e-7)
    assert turned["t_hour_cos"] == pytest.approx([1, 0, -1, 0, 1], abs=1e-7)


def test_a_number_turns_with_its_period() -> None:
    turned = made({"fill_missing": -1}, {"cyclical": {"period": 4}})
    assert turned["f_sin"] == pytest.approx([1, -1, -1, -1, 0], abs=1e-7)


def test_features_with_a_logarithm_or_a_sine_are_distinguished() -> None:
    assert list(plan_of("log1p", "normalize").approximate) == ["f"]
    assert list(plan_of({"cyclical": ["hour"]}, columns=("t",)).approximate) == ["t_hour_sin", "t_hour_cos"]
    assert plan_of("normalize").approximate == {}


def test_a_digest_does_not_see_numbers_that_were_fitted_on_logarithms() -> None:
    (feature,) = plan_of({"fill_missing": 0}, "log1p", "normalize").to_json(exact_only=True)["features"]
    assert feature["steps"] == [
        {"step": "fill_missing", "value": 0.0},
        {"step": "log1p"},
        {"step": "normalize"},
    ]


def test_columns_that_would_share_a_name_are_refused() -> None:
    answer = answer_over([columns_of(WIRE, KINDS)], [np.arange(5)], [TARGET])
    features = [
        FeatureSpec(columns=["f"], steps=["normalize"]),
        FeatureSpec(columns=["f"], steps=["min_max"]),
    ]
    with pytest.raises(DataError, match="2 features are called 'f'"):
        FeaturePlan.fit(features, KINDS, answer)
