"""A peer in its own process: its defaults and drawn settings, judged on the valid rows; the best scores the test
rows once."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.quality.learners import LEARNERS, SPACES, Data, Predict
from benchmarks.quality.rows import categorical_columns, read_rows
from benchmarks.quality.score import score


def run(request: dict[str, Any]) -> dict[str, Any]:
    """`name`: of the learner, `trials`: how many settings it may try."""
    train, train_target = read_rows(request["dataset"], "train")
    valid, valid_target = read_rows(request["dataset"], "valid")
    data = Data(
        train=train, train_target=train_target, valid=valid, valid_target=valid_target,
        codes=categorical_columns(request["dataset"]), task=request["task"], seed=request["seed"],
        threads=request["threads"],
    )  # fmt: skip
    learn, random = LEARNERS[request["name"]], np.random.default_rng(request["seed"])
    best: tuple[float, Predict, dict[str, Any]] | None = None
    for trial in range(request["trials"]):
        settings = {} if trial == 0 else SPACES[request["name"]](random)
        try:
            predict = learn(settings, data)
        except ImportError as error:
            return {"missing": str(error)}
        found = score(valid_target, predict(valid), data.task)
        if best is None or found > best[0]:
            best = found, predict, settings
    assert best is not None
    test, test_target = read_rows(request["dataset"], "test")
    return {"valid": best[0], "test": score(test_target, best[1](test), data.task), "settings": best[2]}
