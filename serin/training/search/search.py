"""Searches for better settings: parallel trials, each an ordinary training, judged by the valid rows alone.

Everything of a search is in its folder: study.db (unless it is stored elsewhere), trials/<settings>/fold-<n>,
trials.csv, importance.svg, result.json. The same call after kill -9 resumes the interrupted trials. Does not import
torch.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from serin.errors import SearchFailed
from serin.spec.model import ModelSpec
from serin.spec.search import SearchSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.launch.run_dir import training_key
from serin.training.launch.run_lock import only_one
from serin.training.search.report import write_report
from serin.training.search.study import Study, Tried
from serin.training.search.trials import Trials


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search: `settings` by their path in the spec; `metrics` of the valid rows, means over the
    folds."""

    folder: str
    settings: dict[str, JsonValue]
    metrics: dict[str, float]
    complete: int
    pruned: int
    failed: int


def search(
    model: ModelSpec,
    training: TrainingSpec,
    spec: SearchSpec,
    datasets: Sequence[Dataset],
    *,
    folder: Path,
    home: Path,
    storage: str | None = None,
    stop: threading.Event | None = None,
) -> SearchResult:
    """Returns the best settings by the mean valid metric over `datasets` (the folds, the newest first).

    Raises SearchStopped when asked to stop: a second call resumes. Raises SearchFailed when no trial could be trained.
    `storage` is an SQLAlchemy URL; several machines with the same one share the study.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder / "search.lock", wait_s=0):
        study = Study(
            url=storage or f"sqlite:///{folder.absolute() / 'study.db'}",
            name=search_key(model, training, spec, datasets),
            spec=spec,
            epochs=training.epochs * len(datasets),
        )
        try:
            runner = Trials(model, training, spec, tuple(datasets), folder, home, study)
            runner.run(stop or threading.Event())
            tried = study.tried()
            best = _best(tried, folder)
            write_report(folder, tried, best, study.importance())
        finally:
            study.close()
    return SearchResult(
        folder=str(folder),
        settings=best.settings,
        metrics=best.metrics,
        complete=sum(one.state == "complete" for one in tried),
        pruned=sum(one.state == "pruned" for one in tried),
        failed=sum(one.state == "failed" for one in tried),
    )


def search_key(
    model: ModelSpec, training: TrainingSpec, spec: SearchSpec, datasets: Sequence[Dataset]
) -> str:
    """Returns a key of what decides which trials belong together; their number, duration and parallelism do not."""
    space = spec.model_dump_json(include={"space", "sampler", "pruner", "seed"})
    parts = [training_key(model, training, dataset) for dataset in datasets]
    return hashlib.sha256(json.dumps([space, parts]).encode()).hexdigest()[:32]


def _best(tried: list[Tried], folder: Path) -> Tried:
    complete = [one for one in tried if one.value is not None and one.state == "complete"]
    if not complete:
        reasons = [one.reason for one in tried if one.reason] or ["no trial was started within the budget"]
        raise SearchFailed(folder=folder, reason=reasons[-1])
    return max(complete, key=lambda one: (one.value or 0.0, -one.number))
