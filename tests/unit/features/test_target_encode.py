"""Target encoding: nobody sees their own target, and a request needs none."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from serin.features.aggregates.exact_sums import folds_of
from serin.features.plan import FeaturePlan
from serin.formats.schema import Kind
from serin.formats.shards import read_split
from serin.spec.features import FeatureSpec
from serin.store.store import Store
from tests.unit.etl.trips import build, table_spec
from tests.unit.features.measured import answer_over, columns_of

KINDS: dict[str, Kind] = {"s": "string"}
ROWS = 400


def sample(seed: int = 1) -> tuple[dict[str, Any], Any, Any]:
    random = np.random.default_rng(seed)
    texts = random.choice(np.asarray(["", "a", "b", "c"], object), ROWS, p=[0.1, 0.5, 0.3, 0.1])
    target = (random.random(ROWS) < np.where(texts == "a", 0.7, 0.2)).astype(np.float32)
    return {"s": texts}, np.arange(1000, 1000 + ROWS), target


def plan_of(wire: Any, rows: Any, target: Any, classes: int = 0, **arguments: Any) -> FeaturePlan:
    step = {"target_encode": {"folds": 4, "smoothing": 10, **arguments}}
    answer = answer_over([columns_of(wire, KINDS)], [rows], [target])
    return FeaturePlan.fit([FeatureSpec(columns=["s"], steps=[step])], KINDS, answer, classes=classes)


def test_a_request_gets_the_smoothed_mean_of_all_training_rows() -> None:
    wire, rows, target = sample()
    plan = plan_of(wire, rows, target)
    asked = columns_of({"s": np.asarray(["a", "", "never seen"], object)}, KINDS)
    num, _ = plan.transform(asked)
    prior = target.mean(dtype=np.float64)
    expected = []
    for text in ("a", ""):
        own = target[wire["s"] == text].astype(np.float64)
        expected.append((own.sum() + 10 * prior) / (len(own) + 10))
    assert num[:, 0].tolist() == pytest.approx([*expected, prior], rel=1e-6)


def test_a_training_row_is_encoded_from_the_other_folds() -> None:
    wire, rows, target = sample()
    plan = plan_of(wire, rows, target)
    num, _ = plan.transform(columns_of(wire, KINDS), rows)
    folds = folds_of(rows, 4)
    for row in range(0, ROWS, 37):
        others = folds != folds[row]
        own = target[others & (wire["s"] == wire["s"][row])].astype(np.float64)
        expected = (own.sum() + 10 * target[others].mean(dtype=np.float64)) / (len(own) + 10)
        assert num[row, 0] == pytest.approx(expected, rel=1e-6)


def test_a_row_s_own_target_never_reaches_it() -> None:
    wire, rows, target = sample()
    changed = target.copy()
    changed[7] = 1 - changed[7]
    before, _ = plan_of(wire, rows, target).transform(columns_of(wire, KINDS), rows)
    after, _ = plan_of(wire, rows, changed).transform(columns_of(wire, KINDS), rows)
    fold = folds_of(rows, 4)
    assert np.array_equal(before[fold == fold[7]], after[fold == fold[7]])
    assert not np.array_equal(before, after)


def test_rows_behind_the_training_rows_are_encoded_as_requests_are() -> None:
    wire, rows, target = sample()
    plan = plan_of(wire, rows, target)
    num, _ = plan.transform(columns_of(wire, KINDS), rows[:100])
    served, _ = plan.transform(columns_of(wire, KINDS))
    assert np.array_equal(num[100:], served[100:])
    assert not np.array_equal(num[:100], served[:100])


def test_several_classes_get_a_share_each() -> None:
    wire, rows, _ = sample()
    target = np.random.default_rng(3).integers(0, 3, ROWS).astype(np.float32)
    plan = plan_of(wire, rows, target, classes=3)
    num, _ = plan.transform(columns_of(wire, KINDS))
    assert plan.numeric == ("s_target_0", "s_target_1", "s_target_2")
    assert num.sum(axis=1) == pytest.approx(np.ones(ROWS), rel=1e-6)


def test_a_plan_that_was_read_back_serves_and_makes_no_training_rows() -> None:
    wire, rows, target = sample()
    plan = plan_of(wire, rows, target)
    again = FeaturePlan.from_json(plan.to_json())
    assert np.array_equal(
        again.transform(columns_of(wire, KINDS))[0], plan.transform(columns_of(wire, KINDS))[0]
    )
    with pytest.raises(AssertionError, match="this plan can serve"):
        again.transform(columns_of(wire, KINDS), rows)


@pytest.mark.parametrize("task", ["regression", "multiclass"])
def test_the_targets_of_a_group_never_reach_its_own_training_rows(tmp_path: Path, task: str) -> None:
    random = np.random.default_rng(2)
    frame = pd.DataFrame(
        {
            "driver": random.integers(0, 40, 800),
            "zone": random.choice(["n", "s", "w"], 800),
            "y": random.integers(0, 3, 800),
        }
    )

    def encoded(folder: Path) -> pd.DataFrame:
        folder.mkdir()
        frame.to_parquet(folder / "rides.parquet", row_group_size=90)
        encode = {"columns": ["driver", "zone"], "steps": [{"target_encode": {"folds": 4, "smoothing": 1}}]}
        spec = table_spec(folder / "rides.parquet", "y", encode, task=task, split={"group": "driver"})
        made = build(spec, Store(str(folder / "store")), piece_rows=100)
        train = read_split(made.path, "train").whole()
        return pd.DataFrame(train.num, index=train.rows)

    before = encoded(tmp_path / "before")
    driver = frame["driver"][before.index[0]]
    frame.loc[frame["driver"] == driver, "y"] = 2
    after = encoded(tmp_path / "after")
    own = before.index[frame["driver"][before.index] == driver]
    assert before.loc[own].equals(after.loc[own])
    assert not before.equals(after)


@pytest.mark.parametrize("smoothing", [0.0, 5e-324, 1e308])
def test_any_smoothing_gives_numbers_also_to_values_of_one_fold_alone(smoothing: float) -> None:
    wire = {"s": np.asarray(["a", "a", "b", "c"], object)}
    target = np.asarray([3e38, -3e38, 1e-40, 2.0], np.float32)
    plan = plan_of(wire, np.arange(4), target, smoothing=smoothing)
    num, _ = plan.transform(columns_of(wire, KINDS), np.arange(4))
    served, _ = plan.transform(columns_of(wire, KINDS))
    assert np.isfinite(num).all()
    mean = np.float32(2 / 4)
    expected = [0.0, 0.0, np.float32(1e-40), 2.0] if smoothing < 1 else [mean] * 4
    assert served[:, 0].tolist() == expected
