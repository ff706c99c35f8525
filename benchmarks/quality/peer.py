"""A peer in its own process: its defaults and drawn settings, judged on the valid rows, while there is time; the best
scores the test rows once."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from benchmarks.quality.learners import LEARNERS, SPACES, Data, Predict
from benchmarks.quality.rows import categorical_columns, read_rows
from benchmarks.quality.score import score


def run(request: dict[str, Any]) -> dict[str, Any]:
    """`name`: of the learner, `budget`: the seconds it has. A setting begins if it would end in time when it takes as
    long as the longest before it; the defaults always run."""
    os.sched_setaffinity(0, request["cores"])
    begin = time.monotonic()
    train, train_target = read_rows(request["dataset"], "train")
    valid, valid_target = read_rows(request["dataset"], "valid")
    data = Data(
        train=train, train_target=train_target, valid=valid, valid_target=valid_target,
        codes=categorical_columns(request["dataset"]), task=request["task"], seed=request["seed"],
        threads=request["threads"], budget=request["budget"],
    )  # fmt: skip
    learn, random = LEARNERS[request["name"]], np.random.default_rng(request["seed"])
    best: tuple[float, Predict, dict[str, Any]] | None = None
    trials, longest = 0, 0.0
    while best is None or time.monotonic() - begin + longest < request["budget"]:
        settings = {} if best is None else SPACES[request["name"]](random)
        began = time.monotonic()
        try:
            predict = learn(settings, data)
        except ImportError as error:
            return {"missing": str(error)}
        found = score(valid_target, predict(valid), data.task)
        trials, longest = trials + 1, max(longest, time.monotonic() - began)
        if best is None or found > best[0]:
            best = found, predict, settings
    test, test_target = read_rows(request["dataset"], "test")
    figure = score(test_target, best[1](test), data.task)
    return {"valid": best[0], "test": figure, "settings": best[2], "trials": trials}
