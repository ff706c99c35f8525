"""What each operator makes of a few values, by hand."""

import datetime as dt
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from serin.columns.column import Column
from serin.columns.hashing import hash_ints, hash_strings
from serin.columns.unscaled import unscaled_warning
from serin.errors import DataError
from serin.features.ops.categorify import FittedCategorify
from serin.features.ops.date_parts import FittedDateParts
from serin.features.plan import FeaturePlan
from serin.formats.schema import INT64_NULL, Kind
from serin.spec.features import FeatureSpec
from tests.unit.features.measured import answer_over, columns_of, fit, strings

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


SAMPLE = strings("b", "a", "b", "c", "c", None, "é", "Z")


def vocabulary(**arguments: int) -> list[str]:
    feature = FeatureSpec(columns=["s"], steps=[{"categorify": arguments}])
    (made,) = fit([feature], {"s": "string"}, {"s": SAMPLE}).categories
    assert isinstance(made.step, FittedCategorify)
    return list(made.step.vocabulary.to_pylist())


def test_the_vocabulary_goes_by_descending_count_then_by_bytes() -> None:
    assert vocabulary() == ["b", "c", "Z", "a", "é"]


def test_rare_values_and_values_beyond_the_size_stay_outside() -> None:
    assert vocabulary(min_count=2) == ["b", "c"]
    assert vocabulary(max_size=3) == ["b", "c", "Z"]


def test_codes_are_null_then_buckets_then_vocabulary() -> None:
    step = FittedCategorify(pa.array(["x", "y"]), 3)
    (codes,) = step.transform(strings("y", None, "x", "unknown"))
    assert codes.tolist() == [5, 0, 4, 1 + int(hash_strings(pa.array(["unknown"]))[0]) % 3]
    assert step.size == 6


@pytest.mark.parametrize("spread", [1, 10**12])
def test_whole_numbers_are_coded_alike_by_table_and_by_hash(spread: int) -> None:
    step = FittedCategorify(pa.array([7 * spread, 3 * spread]), 2)
    values = np.asarray([3, 7, 5, 3, 4], np.int64) * spread
    values[3] = INT64_NULL
    (codes,) = step.transform(Column(kind="int", values=values))
    outside = 1 + hash_ints(values) % 2
    assert codes.tolist() == [4, 3, outside[2], 0, outside[4]]


EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
PARTS = ("minute", "hour", "weekday", "day", "month", "quarter")


def codes(*times: int) -> list[tuple[int, ...]]:
    made = FittedDateParts(PARTS).transform(Column(kind="timestamp", values=np.asarray(times, np.int64)))
    return list(zip(*(part.tolist() for part in made), strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_every_part_agrees_with_the_calendar_from_year_1_to_9999(seed: int) -> None:
    rng = np.random.default_rng(seed)
    moments = [
        dt.datetime.min.replace(tzinfo=dt.UTC) + dt.timedelta(days=int(day), seconds=int(second))
        for day, second in zip(rng.integers(0, 3_652_058, 2000), rng.integers(0, 86_400, 2000), strict=True)
    ]
    times = [(moment - EPOCH) // dt.timedelta(microseconds=1) for moment in moments]
    expected = [
        (m.minute + 1, m.hour + 1, m.isoweekday(), m.day, m.month, (m.month - 1) // 3 + 1) for m in moments
    ]
    assert codes(*times) == expected


def test_the_last_microsecond_of_a_leap_day_before_1970_is_in_that_day() -> None:
    moment = dt.datetime(1968, 2, 29, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    time = (moment - EPOCH) // dt.timedelta(microseconds=1)
    assert codes(time, time + 1) == [(60, 24, 4, 29, 2, 1), (1, 1, 5, 1, 3, 1)]


def test_a_null_time_has_code_0_in_every_part() -> None:
    assert codes(INT64_NULL) == [(0,) * len(PARTS)]


def test_outputs_carry_the_part_in_their_name_and_a_fixed_size() -> None:
    outputs = FittedDateParts(("hour", "month")).outputs("departure")
    assert [(output.name, output.size) for output in outputs] == [
        ("departure_hour", 25),
        ("departure_month", 13),
    ]


@pytest.mark.parametrize("parts", [PARTS, PARTS[1:]])
@pytest.mark.parametrize("in_order", [True, False])
def test_times_that_lie_close_together_have_the_parts_of_the_calendar(
    parts: tuple[str, ...], in_order: bool
) -> None:
    seconds = np.random.default_rng(1).integers(-300_000, 300_000, 20_000)
    seconds = np.sort(seconds) if in_order else seconds
    made = FittedDateParts(parts).transform(Column(kind="timestamp", values=seconds * 1_000_000 + 999_999))
    moments = [EPOCH + dt.timedelta(seconds=int(second)) for second in seconds]
    expected = [
        (m.minute + 1, m.hour + 1, m.isoweekday(), m.day, m.month, (m.month - 1) // 3 + 1)[6 - len(parts) :]
        for m in moments
    ]
    assert list(zip(*(part.tolist() for part in made), strict=True)) == expected


RANDOM = np.random.default_rng(4)
FINE = {
    "normalized": RANDOM.normal(size=1000),
    "a share": RANDOM.random(1000),
    "a flag that is nearly always off": (RANDOM.random(1000) < 0.001).astype(float),
    "hours": RANDOM.integers(0, 24, 1000).astype(float),
    "zeros": np.zeros(1000),
    "nothing": np.full(1000, np.nan),
    "one outlier": np.append(RANDOM.normal(size=1000), 500.0),
}
UNSCALED = {
    "dollars": RANDOM.lognormal(10, 1, 1000),
    "a year": RANDOM.integers(1990, 2020, 1000).astype(float),
    "far from zero": 1e6 + RANDOM.normal(size=1000),
    "meters per light year": RANDOM.normal(0, 1e-9, 1000),
    "with nulls": np.append(RANDOM.normal(0, 1e4, 1000), np.nan),
}


@pytest.mark.parametrize("name", FINE)
def test_numbers_of_about_one_are_fit_for_a_network(name: str) -> None:
    assert unscaled_warning({name: FINE[name]}) is None


@pytest.mark.parametrize("name", UNSCALED)
def test_large_and_tiny_numbers_are_named_with_the_remedies(name: str) -> None:
    text = unscaled_warning({**FINE, name: UNSCALED[name]})
    assert text.startswith(f"not scaled for a network: {name} (")
    assert "end the steps of these columns with normalize, or set model.numeric_scaling: robust" in text


def test_of_many_columns_three_are_shown() -> None:
    assert "and 2 more" in str(unscaled_warning(UNSCALED))
