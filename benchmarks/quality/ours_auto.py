"""Serin's contender of the quality table: `model.kind: auto`, and the best network among its candidates."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.score import score
from serin.formats.blend import read_blend
from serin.formats.shards import read_split
from serin.formats.trained import BLEND, TREES, read_record
from serin.models.margins import open_margins
from serin.models.trees import scores
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.launch.job import TrainingJob
from serin.training.programs import auto


def run(request: dict[str, Any]) -> dict[str, Any]:
    """`trials`: how many candidates it may train."""
    job = TrainingJob(
        model=ModelSpec.model_validate({"kind": "auto", "auto": {"trials": request["trials"]}}),
        training=TrainingSpec(seed=request["seed"]), dataset=request["dataset"], dataset_digest="",
        processes=1, gpu=False, test=False,
    )  # fmt: skip
    rows, task = read_split(request["dataset"], "test").whole(), request["task"]
    num, cat, target = np.asarray(rows.num), np.asarray(rows.cat), np.asarray(rows.target)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        auto.train(job, folder, threading.Event())
        result = folder / "result"
        members = read_blend(result) if read_record(result).file == BLEND else [(result, 1.0)]
        margin = sum(weight * open_margins(place)(num, cat).astype(np.float64) for place, weight in members)
        choices = json.loads((result / "state.json").read_text())["choices"]
        answer = {"test": score(target, scores(np.asarray(margin, np.float32), task), task), **choices}
        places = {name: folder / "candidates" / name / "result" for name in choices["valid"]}
        networks = [name for name, place in places.items() if read_record(place).file != TREES]
        if networks:
            best = max(networks, key=lambda name: choices["valid"][name])
            found = scores(open_margins(places[best])(num, cat), task)
            answer |= {"network": best, "network_test": score(target, found, task)}
    return answer
