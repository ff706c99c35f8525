"""Searches for better settings: parallel trials, each an ordinary training, judged by the valid rows alone.

Everything of a search is in its folder: study.db (unless it is stored elsewhere), trials/<settings>/fold-<n>,
trials.csv, importance.svg, result.json. The same call after kill -9 resumes the interrupted trials. Does not import
torch.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from serin.errors import ExtraMissing, SearchFailed, SpecError
from serin.machine.durable import write_whole
from serin.reports.tuning import SearchChart, search_chart
from serin.spec.model import ModelSpec
from serin.spec.search import SearchSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.launch.job import only_one
from serin.training.launch.run_dir import training_key
from serin.training.search.study import Study, Tried, objective_name
from serin.training.search.trials import Trials

CHART = "importance.svg"


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


def write_report(folder: Path, tried: Sequence[Tried], best: Tried, importance: Mapping[str, float]) -> None:
    """Writes trials.csv, result.json and importance.svg to `folder`."""
    write_whole(folder / "trials.csv", trials_csv(tried))
    document = {
        "format": "serin.search",
        "version": 1,
        "settings": best.settings,
        "metrics": best.metrics,
        "trial": best.number,
        "importance": dict(importance),
        "trials": [_row(one) for one in tried],
    }
    write_whole(folder / "result.json", json.dumps(document, indent=1) + "\n")
    write_whole(folder / CHART, search_chart(_chart(tried, best, importance)))


def trials_csv(tried: Sequence[Tried]) -> str:
    paths = sorted({path for one in tried for path in one.settings})
    name = next((objective_name(one.metrics) for one in tried if one.metrics), "valid")
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["trial", "state", name, "seconds", *paths, "reason"])
    for one in tried:
        metric = one.metrics.get(name, "")
        settings = [json.dumps(one.settings[path]) if path in one.settings else "" for path in paths]
        writer.writerow([one.number, one.state, metric, _seconds(one), *settings, one.reason])
    return out.getvalue()


def _chart(tried: Sequence[Tried], best: Tried, importance: Mapping[str, float]) -> SearchChart:
    name = objective_name(best.metrics)
    values = {one.number: one.metrics[name] for one in tried if name in one.metrics and one.value is not None}
    return SearchChart(metric=name, values=values, best=best.number, importance=importance)


def _row(one: Tried) -> dict[str, object]:
    return {
        "trial": one.number,
        "state": one.state,
        "settings": one.settings,
        "metrics": one.metrics,
        "seconds": _seconds(one),
        "reason": one.reason,
    }


def _seconds(one: Tried) -> float | None:
    return None if one.seconds is None else round(one.seconds, 2)


def write_chosen(source: Path, settings: Mapping[str, JsonValue], target: Path, *, remark: str) -> None:
    """Writes `target`: `source` with `settings` (by their path in the spec), and `remark` as a comment above."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.comments import CommentedMap, CommentedSeq
    except ImportError as error:
        raise ExtraMissing(package="ruamel.yaml", extra="search") from error
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    document: Any = yaml.load(source.read_text(encoding="utf-8"))
    if not isinstance(document, CommentedMap):
        raise SpecError(where=str(source), problems=[("", "has no keys")])
    for path, value in settings.items():
        *sections, last = path.split(".")
        place = document
        for name in sections:
            if place.get(name) is None:
                place[name] = CommentedMap()
            place = place[name]
        if isinstance(value, list):
            chosen: Any = CommentedSeq(value)
            chosen.fa.set_flow_style()
        else:
            chosen = value
        place[last] = chosen
    text = io.StringIO()
    yaml.dump(document, text)
    target.write_text(f"# {remark}\n{text.getvalue()}", encoding="utf-8")
