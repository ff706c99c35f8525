"""XGBoost's trees and their graph answer alike: missing values, sets of categories, single leaves."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost

from serin.errors import ExportFailed
from serin.export.convert.trees2onnx import parse_trees, trees2onnx
from serin.export.session import open_session
from serin.formats.schema import Task
from serin.models.shape import TableShape
from serin.models.trees import column_types, joined, margins

SIZES = (3, 25, 400)  # the last one is split by the order of its codes
ROWS = 4000
OBJECTIVES = {"binary": "binary:logistic", "multiclass": "multi:softprob", "regression": "reg:squarederror"}


def table(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    num = random.normal(size=(ROWS, 3)).astype(np.float32)
    num[random.random(num.shape) < 0.1] = np.nan
    cat = np.stack([random.integers(0, size, ROWS) for size in SIZES], axis=1)
    effect = np.random.default_rng(1).normal(size=SIZES[1])[cat[:, 1]]
    return num, cat, np.nan_to_num(num[:, 0]) + effect + (cat[:, 2] > 200) + 0.3 * random.normal(size=ROWS)


def grow(task: Task, *, rounds: int = 30, **settings: object) -> xgboost.Booster:
    num, cat, signal = table()
    target = {
        "binary": signal > 0.5,
        "multiclass": np.digitize(signal, [0, 1]),
        "regression": 4e4 + 900 * signal,
    }
    rows = xgboost.DMatrix(
        joined(num, cat), target[task].astype(np.float32), feature_types=column_types(3, SIZES),
        enable_categorical=True,
    )  # fmt: skip
    classes = {"num_class": 3} if task == "multiclass" else {}
    return xgboost.train({"objective": OBJECTIVES[task], "nthread": 1, **classes, **settings}, rows, rounds)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_the_graph_answers_as_xgboost_does(task: Task) -> None:
    booster = grow(task)
    shape = TableShape(numeric=3, sizes=SIZES, outputs=3 if task == "multiclass" else 1)
    session = open_session(trees2onnx(parse_trees(booster), shape, task))
    num, cat, _ = table(seed=9)

    wanted = margins(booster, num, cat, SIZES)
    for rows in (1, 7, ROWS):
        (found,) = session.run(["logits"], {"num": num[:rows], "cat": cat[:rows]})
        apart = np.abs(found - wanted[:rows]).max() / max(1.0, float(np.abs(wanted).max()))
        print(f"{task}, {rows} rows: {apart:.2g} apart")
        assert found.dtype == np.float32
        assert apart < 1e-5


def test_every_kind_of_split_was_met() -> None:
    trees = parse_trees(grow("binary"))["learner"]["gradient_booster"]["model"]["trees"]

    assert any(sum(tree["split_type"]) for tree in trees)  # by sets of categories ...
    assert any(0 in tree["default_left"] for tree in trees)  # ... and both ways for missing values
    assert any(1 in tree["default_left"] for tree in trees)


def test_trees_that_are_a_single_leaf_answer_with_it() -> None:
    booster = grow("regression", rounds=3, gamma=1e12)
    session = open_session(
        trees2onnx(parse_trees(booster), TableShape(numeric=3, sizes=SIZES, outputs=1), "regression")
    )
    num, cat, _ = table()

    (found,) = session.run(["logits"], {"num": num[:5], "cat": cat[:5]})

    assert found == pytest.approx(margins(booster, num[:5], cat[:5], SIZES), rel=1e-6)


def test_trees_of_another_table_are_refused() -> None:
    with pytest.raises(ExportFailed, match="need 6 columns, but the table has 4"):
        trees2onnx(
            parse_trees(grow("binary", rounds=2)), TableShape(numeric=4, sizes=(), outputs=1), "binary"
        )
    with pytest.raises(ExportFailed, match="KeyError"):
        trees2onnx({"learner": {}}, TableShape(numeric=4, sizes=(), outputs=1), "binary")
