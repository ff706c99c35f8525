"""Searches for better settings: parallel trials, each an ordinary training, judged by the valid rows alone.

Everything of a search is in its folder: study.db (unless it is stored elsewhere), trials/<settings>/fold-<n>,
trials.json (those so far), trials.csv, importance.svg, result.json. The same call after kill -9 resumes the interrupted
trials. Does not import torch.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from serin.errors import (
    CodeChanged,
    ExtraMissing,
    LeaseUnavailable,
    LossNotFinite,
    NetworkUnfit,
    Preempted,
    SearchFailed,
    SearchStopped,
    SpecError,
    TrainingRefused,
    WorkerFailed,
)
from serin.machine.durable import write_whole
from serin.machine.hardware import inventory
from serin.machine.leases import lease
from serin.reports.search import SearchChart, search_file
from serin.spec.model import ModelSpec
from serin.spec.names import Priority
from serin.spec.search import SearchSpec, with_values
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.launch.job import only_one
from serin.training.launch.launcher import train
from serin.training.launch.processes import sigterm_sets
from serin.training.launch.progress import progress_file
from serin.training.launch.run_dir import own_code, training_key
from serin.training.search.study import Study, Trial, Tried, objective, objective_name

logger = logging.getLogger(__name__)

CHART = "importance.svg"
_POLL_S = 0.1
_HOPELESS = 3  # failed trials and no other: the rest would fail too
_FAULTS = (LossNotFinite, NetworkUnfit, TrainingRefused, WorkerFailed, ValidationError)


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
    priority: Priority = "normal",
    stop: threading.Event | None = None,
) -> SearchResult:
    """Returns the best settings by the mean valid metric over `datasets` (the folds, the newest first).

    Raises SearchStopped when asked to stop: a second call resumes. Raises SearchFailed when no trial could be trained.
    `storage` is an SQLAlchemy URL; several machines with the same one share the study. `priority`: that of its trials.
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
            runner = Trials(model, training, spec, tuple(datasets), folder, home, study, priority)
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
    write_whole(folder / CHART, search_file(_chart(tried, best, importance)))


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


class Trials:
    """Runs trials in as many threads as run in parallel; each waits for processes, so threads are enough."""

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        spec: SearchSpec,
        datasets: tuple[Dataset, ...],
        folder: Path,
        home: Path,
        study: Study,
        priority: Priority = "normal",
    ) -> None:
        self._model, self._training, self._spec, self._datasets = model, training, spec, datasets
        self._folder, self._home, self._study, self._priority = folder, home, study, priority
        self._gpus_each, self._side_by_side = share_devices(spec, training, len(inventory()))
        self._code = own_code(model)  # trials of other code are not compared with each other
        self._end = threading.Event()  # no more trials; running ones save and stop
        self._closing = threading.Lock()
        self._began = time.monotonic()

    def run(self, stop: threading.Event) -> None:
        again = self._study.take_over()
        if again:
            logger.info(f"resuming {len(again)} interrupted trial(s)")
        before = self._study.begun()
        if before:
            logger.info(f"{before} of {self._study.planned()} trials were done before")
        count = min(self._side_by_side, self._study.planned())
        with sigterm_sets(stop), ThreadPoolExecutor(count, thread_name_prefix="trial") as threads:
            work = [threads.submit(self._work) for _ in range(count)]
            try:
                while not wait(work, _POLL_S, FIRST_EXCEPTION).done >= set(work):
                    if stop.is_set() or any(one.done() and one.exception() for one in work):
                        self._end.set()
            finally:  # an interrupted wait leaves no training behind
                self._end.set()
        for one in work:
            one.result()
        if stop.is_set():
            raise SearchStopped(folder=self._folder, begun=self._study.begun())

    def _work(self) -> None:
        until = math.inf if self._spec.budget is None else self._began + self._spec.budget
        while not self._end.is_set() and time.monotonic() <= until:
            trial = self._study.ask()
            if trial is None:
                return
            self._try(trial)
            self._give_up_if_hopeless()

    def _give_up_if_hopeless(self) -> None:
        ended = [one for one in self._study.tried() if one.state not in ("running", "waiting")]
        if len(ended) >= _HOPELESS and all(one.state == "failed" for one in ended):
            raise SearchFailed(folder=self._folder, reason=ended[-1].reason)

    def _try(self, trial: Trial) -> None:
        began, pruned = time.monotonic(), threading.Event()
        stop = _Either(self._end, pruned)
        text = ", ".join(
            f"{path.partition('.')[2]} {f'{value:.3g}' if isinstance(value, float) else json.dumps(value)}"
            for path, value in trial.settings.items()
        )
        try:
            model, training = with_values(self._model, self._training, trial.settings)
            if training.processes == "auto":
                training = training.model_copy(update={"processes": max(1, self._gpus_each)})
            with self._devices() as devices:
                metrics = self._folds(trial, model, training, devices, stop, pruned)
        except Preempted:
            if pruned.is_set():
                self._close(trial, "pruned", f"stopped early ({text})", began)
            return  # asked to stop: it stays as running, and the next search resumes it
        except _FAULTS as error:
            reason = _why(error)
            self._close(trial, "failed", f"failed ({text}): {reason.splitlines()[0]}", began, reason=reason)
            return
        found = objective(metrics)
        if found is None:
            reason = "it reported no metric of the valid rows"
            self._close(
                trial, "failed", f"failed ({text}): no metric of the valid rows", began, reason=reason
            )
            return
        name = objective_name(metrics)
        said = f"{name} {metrics[name]:.4f} ({text})"
        self._close(trial, "complete", said, began, value=found, metrics=metrics)

    def _close(self, trial: Trial, state: str, text: str, began: float, **found: Any) -> None:
        """Records a trial's end and says it. One trial at a time, so that each line counts one more than the last."""
        with self._closing:
            trial.end(state, seconds=time.monotonic() - began, **found)
            rows = [_row(one) for one in self._study.tried()]
            document = {"format": "serin.search.trials", "version": 1, "trials": rows}
            write_whole(self._folder / "trials.json", json.dumps(document) + "\n")
            self._tell(trial, text)

    def _folds(
        self,
        trial: Trial,
        model: ModelSpec,
        training: TrainingSpec,
        devices: tuple[str, ...],
        stop: threading.Event,
        pruned: threading.Event,
    ) -> dict[str, float]:
        """Returns the valid rows' metrics as means over the folds. A fold that was trained before is only read."""
        done: list[dict[str, float]] = []
        digest = hashlib.sha256(json.dumps(trial.settings, sort_keys=True).encode()).hexdigest()[:16]
        reported = 0

        def judge(fold: dict[str, float], step: int) -> None:
            nonlocal reported
            value = objective(_means([*done, fold]))
            if value is not None and step > reported and not pruned.is_set():
                reported = step
                last = len(done) + 1 == len(self._datasets) and step >= len(self._datasets) * training.epochs
                if trial.report(value, step) and not last:
                    pruned.set()

        for number, dataset in enumerate(self._datasets):
            if own_code(self._model) != self._code:
                raise CodeChanged(folder=self._folder)
            place = self._folder / "trials" / digest / f"fold-{number}"

            def hear(record: dict[str, Any], place: Path = place, number: int = number) -> None:
                if record["event"] == "epoch":
                    for epoch, best in _best_by_epoch(place):
                        judge(best, number * training.epochs + epoch)

            checkpoint = train(
                model, training, dataset, folder=place, devices=devices, stop=stop, test=False, hear=hear
            )
            valid = {name: value for name, value in checkpoint.metrics.items() if name.startswith("valid_")}
            judge(valid, (number + 1) * training.epochs)
            done.append(valid)
            if pruned.is_set() and number + 1 < len(self._datasets):
                raise Preempted(step=checkpoint.step, folder=place)
        return _means(done)

    @contextmanager
    def _devices(self) -> Iterator[tuple[str, ...]]:
        """Leases this trial's GPUs. Waits as long as needed, unless asked to stop."""
        wanted = lease(
            self._gpus_each,
            home=self._home,
            purpose="a trial",
            priority=self._priority,
            wait_s=math.inf,
            stop=self._end,
        )
        with ExitStack() as stack:
            try:
                held = stack.enter_context(wanted)
            except LeaseUnavailable as error:
                if self._end.is_set():
                    raise Preempted(step=0, folder=self._folder) from error
                raise  # too few: they were here a moment ago
            yield held.ids

    def _tell(self, trial: Trial, text: str) -> None:
        tried = self._study.tried()
        ended = sum(one.state not in ("running", "waiting") for one in tried)
        best = max(
            (one for one in tried if one.value is not None and one.metrics),
            key=lambda one: one.value or 0.0,
            default=None,
        )
        shown = ""
        if best is not None:
            name = objective_name(best.metrics)
            shown = f"; best: trial {best.number}, {name} {best.metrics[name]:.4f}"
        logger.info(
            f"trial {trial.number}: {text}; {ended} of {self._study.planned()} done{shown}{self._left(tried)}"
        )

    def _left(self, tried: list[Tried]) -> str:
        times = [one.seconds for one in tried if one.seconds]
        ended = sum(one.state not in ("running", "waiting") for one in tried)
        ahead = self._study.planned() - ended
        if not times or ahead <= 0:
            return ""
        seconds = sum(times) / len(times) * ahead / self._side_by_side
        if self._spec.budget is not None:
            seconds = min(seconds, max(0.0, self._spec.budget - (time.monotonic() - self._began)))
        return f"; about {seconds / 60:.0f} min left" if seconds >= 90 else f"; about {seconds:.0f} s left"


class _Either(threading.Event):
    """An event that is set when one of two others is, or when it is set itself."""

    def __init__(self, *others: threading.Event) -> None:
        super().__init__()
        self._others = others

    def is_set(self) -> bool:
        return super().is_set() or any(other.is_set() for other in self._others)


def share_devices(spec: SearchSpec, training: TrainingSpec, present: int) -> tuple[int, int]:
    """Returns (GPUs for each trial, parallel trials). A trial takes one GPU unless its processes are given."""
    each = 0 if not present else 1 if training.processes == "auto" else min(training.processes, present)
    if spec.parallel != "auto":
        return each, spec.parallel
    return each, max(1, present // each) if each else 1


def _best_by_epoch(place: Path) -> list[tuple[int, dict[str, float]]]:
    """Returns after each epoch so far the metrics of the best one until then, also from before an interruption."""
    epochs: dict[int, dict[str, float]] = {}
    for line in progress_file(place).read_bytes().splitlines():
        record = json.loads(line)
        if record["event"] == "epoch":
            epochs[record["epoch"]] = record["metrics"]
    found: list[tuple[int, dict[str, float]]] = []
    best: dict[str, float] = {}
    for epoch in sorted(epochs):
        valid = {name: value for name, value in epochs[epoch].items() if name.startswith("valid_")}
        now, before = objective(valid), objective(best)
        if before is None or (now is not None and now > before):
            best = valid
        found.append((epoch, best))
    return found


def _means(folds: Sequence[dict[str, float]]) -> dict[str, float]:
    names = [name for name in folds[0] if all(name in fold for fold in folds)]
    return {name: sum(fold[name] for fold in folds) / len(folds) for name in names}


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
    return str(error)
