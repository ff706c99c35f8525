"""Serin's contender of the quality table: `model.kind: auto`, and the best network among its candidates."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.score import score
from serin.formats.shards import Array, read_split
from serin.formats.trained import BLEND, TREES, read_blend, read_record
from serin.models.build import open_margins
from serin.models.trees import scores
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.launch.job import TrainingJob
from serin.training.programs import auto


def run(request: dict[str, Any]) -> dict[str, Any]:
    """`budget`: the seconds it has; `cores`: those it may use."""
    os.sched_setaffinity(0, request["cores"])
    settings = {"trials": 100, "budget": f"{request['budget']}s", **request.get("auto", {})}
    job = TrainingJob(
        model=ModelSpec.model_validate({"kind": "auto", "auto": settings}),
        training=TrainingSpec(seed=request["seed"]), dataset=request["dataset"], dataset_digest="",
        processes=1, gpu=False, test=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        auto.train(job, folder, threading.Event())
        result = folder / "result"
        members = read_blend(result) if read_record(result).file == BLEND else [(result, 1.0)]
        choices = json.loads((result / "state.json").read_text())["choices"]
        answer = {"test": _score(request, members), **choices}
        places = {name: _results(folder / "candidates" / name) for name in choices["valid"]}
        networks = [name for name, found in places.items() if read_record(found[0]).file != TREES]
        if networks:
            best = max(networks, key=lambda name: choices["valid"][name])
            whole = folder / "candidates" / best / "all" / "result"  # trained on the valid rows too
            found = [whole] if whole.is_dir() else places[best]
            members = [(place, 1 / len(found)) for place in found]
            answer |= {"network": best, "network_test": _score(request, members)}
    return answer


def _results(place: Path) -> list[Path]:
    """Returns the models of a candidate: the one that the valid rows judged, or those of all folds."""
    held_out = place / "valid" / "result"
    return [held_out] if held_out.is_dir() else sorted(place.glob("[0-9]*/result"))


def _score(request: dict[str, Any], members: list[tuple[Path, float]]) -> float:
    rows = read_split(request["dataset"], "test").whole()
    num, cat = np.asarray(rows.num), np.asarray(rows.cat)
    margin: Array = sum(
        weight * open_margins(place)(num, cat).astype(np.float64) for place, weight in members
    )
    found = scores(np.asarray(margin, np.float32), request["task"])
    return score(np.asarray(rows.target), found, request["task"])
