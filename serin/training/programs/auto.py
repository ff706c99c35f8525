"""Trains candidates of several kinds one after the other and keeps the best, or a weighted blend of a few.

`python -m serin.training.programs.auto FOLDER PARENT_PID`, started by the launcher for `model.kind: auto`. Every
candidate is an ordinary training in `candidates/NAME/FOLD`, so that an interrupted run finds those that are done. Only
rows that a model was not trained on decide; the test rows are scored once, by what was chosen. How it ended is in
status.json.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from serin.errors import LossNotFinite, NetworkUnfit, Preempted, TrainingRefused, WorkerFailed
from serin.formats.dataset import FEATURES, DatasetDescription, SplitDescription, read_dataset, write_dataset
from serin.formats.schema import Task
from serin.formats.shards import Array, Rows, count_parts, read_split, seal_part, write_rows
from serin.formats.trained import read_trained, write_blend, write_trained
from serin.models.margins import open_margins
from serin.models.trees import load_xgboost, scores
from serin.training.engine.evaluate import goodness
from serin.training.launch.job import TrainingJob
from serin.training.launch.progress import tell
from serin.training.launch.status import Status
from serin.training.programs.attempt import run_attempt
from serin.training.programs.auto_fit import Fitted, fit_candidate, fit_one
from serin.training.programs.auto_portfolio import candidates
from serin.training.results.judge import judge_scores
from serin.training.results.publish import publish_result

_FAULTS = (LossNotFinite, NetworkUnfit, TrainingRefused, WorkerFailed, torch.OutOfMemoryError)
_FOLDS, _ALL, _CANDIDATES = "folds", "all", "candidates"
_LEAST_CANDIDATES = 3  # that a budget must allow on the folds
_MOST_SHARE = 0.25  # of the budget, for growing the trees of one training
Member = tuple[Path, float]
_INDEPENDENT = ("random", "stratified")
_MOST_BYTES = 2**28  # of all folds together
MOST_MEMBERS = 4  # each one costs its time in every request
_ROUNDS = 25


"""A result folder and the weight of its answers."""


def main() -> None:
    run_attempt(train)


def train(job: TrainingJob, folder: Path, stop: threading.Event) -> Status:
    """Runs one attempt to the end. Raises Preempted."""
    data, clock = read_dataset(job.dataset), _Clock(job.model.auto.budget)
    if not data.rows.get("valid"):
        reason = "model.kind: auto chooses by the valid rows, and there are none; set data.split.valid"
        raise TrainingRefused(folder=folder, reason=reason)
    folds = _choose_folds(job, data, folder, stop, clock)
    target = np.concatenate([np.asarray(read_split(fold, "valid").whole().target) for fold in folds])
    fitted = _fit_candidates(job, data, folder, folds, stop, clock)

    def judge(margin: Array) -> dict[str, float]:
        return judge_scores(
            target, scores(np.asarray(margin, np.float32), data.task), data.task, data.targets
        )

    margins = {name: each.margins for name, each in fitted.items()}
    weights = choose_weights(margins, lambda margin: goodness(judge(margin)), blend=job.model.auto.ensemble)
    tell(folder, "note", text="chosen: " + ", ".join(f"{name} {each:.0%}" for name, each in weights.items()))
    blended = sum(weight * margins[name].astype(np.float64) for name, weight in weights.items())
    metrics = {f"valid_{name}": value for name, value in judge(np.asarray(blended)).items()}
    members = _members(job, data, folder, fitted, weights, stop, clock)
    if job.test and data.rows.get("test"):
        metrics |= _test(job, data, members)
    judged = {name: goodness(judge(margin)) for name, margin in margins.items()}
    _publish(job, data, folder, members, metrics, {"weights": dict(weights), "valid": judged})
    shutil.rmtree(folder / _FOLDS, ignore_errors=True)
    rows = len(fitted) * len(folds) * data.rows["train"]
    return Status(state="done", step=len(fitted), rows=rows, work_s=clock.elapsed)


class _Clock:
    """The time of this attempt, and what fits into the rest of the budget."""

    def __init__(self, budget: float) -> None:
        self._began, self.budget = time.monotonic(), budget

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def most_s(self) -> float:
        return self.budget * _MOST_SHARE

    def has(self, seconds: float) -> bool:
        return self.elapsed + seconds <= self.budget

    def allows(self, done: Iterable[Fitted], refits: bool) -> bool:
        """Returns whether one more candidate fits that takes as long as the longest so far; with `refits`, also all of
        them a second time."""
        took = [each.seconds for each in done]
        longest = max(took)
        return self.has(longest + (sum(took) + longest if refits else 0.0))


def _choose_folds(
    job: TrainingJob, data: DatasetDescription, folder: Path, stop: threading.Event, clock: _Clock
) -> list[Path]:
    """Returns the datasets that every candidate is trained on: as many of the folds as a few candidates can be trained
    on within the budget, which the first training on one shows; or the dataset itself where rows must stay in their
    splits."""
    count = job.model.auto.folds
    if count < 2 or not may_fold(job.dataset, data) or not fits(data, count):
        return [Path(job.dataset)]
    rows, first = pooled(job.dataset), candidates(job, data)[0]
    numbers = fold_numbers(rows.target, data.task, count, job.training.seed)
    folds = [folder / _FOLDS / str(number) for number in range(count)]
    write_fold(folds[0], data, rows, numbers == 0)
    chosen = folder / _CANDIDATES / "folds"
    if not chosen.exists():  # a resumed run does the same
        load_xgboost()  # the import takes longer than some folds
        began = clock.elapsed
        with suppress(*_FAULTS):  # it will fail again, and be reported then
            fit_one(job, first, folds[0], folder / _CANDIDATES / first.name / "0", stop, most_s=clock.most_s)
        took = max(clock.elapsed - began, 1e-3)
        chosen.parent.mkdir(exist_ok=True)
        chosen.write_text(str(max(1, min(count, int(clock.budget / (_LEAST_CANDIDATES * took))))))
    used = folds[: int(chosen.read_text())]
    if len(used) < count:
        tell(folder, "note", text=f"{len(used)} of {count} folds: no time for more within model.auto.budget")
    for number, fold in enumerate(used[1:], start=1):
        write_fold(fold, data, rows, numbers == number)
    return used


def _fit_candidates(
    job: TrainingJob,
    data: DatasetDescription,
    folder: Path,
    folds: Sequence[Path],
    stop: threading.Event,
    clock: _Clock,
) -> dict[str, Fitted]:
    """Returns the candidates that could be trained, at least one."""
    found: dict[str, Fitted] = {}
    reason, refits = "", _refits(job, folds)
    for number, candidate in enumerate(candidates(job, data, len(folds))):
        if number >= job.model.auto.trials or (found and not clock.allows(found.values(), refits)):
            break
        if stop.is_set():
            raise Preempted(step=number, folder=folder)
        try:
            place = folder / _CANDIDATES / candidate.name
            fitted = fit_candidate(job, candidate, folds, place, stop, most_s=clock.most_s)
        except _FAULTS as error:
            reason = str(error)
            tell(folder, "note", text=f"candidate {candidate.name} failed: {reason.splitlines()[0]}")
            continue
        found[candidate.name] = fitted
        tell(folder, "note", text=f"candidate {candidate.name}: {fitted.seconds:.1f} s")
    if not found:
        raise TrainingRefused(folder=folder, reason=f"every candidate failed, the last one with: {reason}")
    return found


def _refits(job: TrainingJob, folds: Sequence[Path]) -> bool:
    """Returns whether what was chosen is trained again on the train and valid rows together. The models of several
    folds are blended instead: each row was seen by most of them."""
    return len(folds) == 1 or not job.model.auto.ensemble


def _members(
    job: TrainingJob,
    data: DatasetDescription,
    folder: Path,
    fitted: Mapping[str, Fitted],
    weights: Mapping[str, float],
    stop: threading.Event,
    clock: _Clock,
) -> list[Member]:
    """Returns the models of the answer with their weights."""
    if not _refits(job, next(iter(fitted.values())).results):
        return [
            (result, weight / len(fitted[name].results))
            for name, weight in weights.items()
            for result in fitted[name].results
        ]
    place = folder / _FOLDS / _ALL
    write_fold(place, data, pooled(job.dataset), None)
    members = []
    for name, weight in weights.items():
        each = fitted[name]
        again = folder / _CANDIDATES / name / _ALL
        if len(each.results) > 1 or clock.has(each.seconds):
            whole = each.candidate.for_all_rows(each.amount)
            members.append((fit_one(job, whole, place, again, stop), weight))
        else:
            tell(folder, "note", text=f"{name} stays as it is: no time to train it on the valid rows too")
            members.append((each.results[0], weight))
    return members


def _test(job: TrainingJob, data: DatasetDescription, members: Sequence[Member]) -> dict[str, float]:
    rows = read_split(job.dataset, "test").whole()
    num, cat = np.asarray(rows.num), np.asarray(rows.cat)
    blended = sum(weight * open_margins(place)(num, cat).astype(np.float64) for place, weight in members)
    found = scores(np.asarray(blended, np.float32), data.task)
    judged = judge_scores(np.asarray(rows.target), found, data.task, data.targets)
    return {f"test_{name}": value for name, value in judged.items()}


def _publish(
    job: TrainingJob,
    data: DatasetDescription,
    folder: Path,
    members: Sequence[Member],
    metrics: dict[str, float],
    choices: dict[str, dict[str, float]],
) -> None:
    """Publishes the one that was chosen as if it had been asked for, or the blend."""
    sizes = [column.size for column in data.categorical]
    shape = {"numeric": len(data.numeric), "sizes": sizes, "outputs": data.outputs}

    def fill(scratch: Path) -> None:
        if len(members) > 1:
            write_blend(
                scratch, members, {"model": job.model.model_dump(), "shape": shape, "task": data.task}
            )
            return
        record, content = read_trained(members[0][0])
        write_trained(scratch, content, record.model_dump(exclude={"weights_sha256"}))

    steps = len(choices["valid"])
    publish_result(
        folder, fill=fill, job=job, step=steps, steps=steps, choices=dict(choices), metrics=metrics
    )


# A fold is an ordinary dataset folder, so that every kind of model trains on it as on any other. Test rows are never
# read.
def may_fold(dataset: str, data: DatasetDescription) -> bool:
    """Returns whether rows may change places between train and valid without leaking answers from one to the other.

    Not when the split follows time or groups, nor when a feature was made from the targets of the train rows.
    """
    features = Path(dataset) / FEATURES
    encoded = features.is_file() and '"target_encode"' in features.read_text(encoding="utf-8")
    return data.split_kind in _INDEPENDENT and not encoded


def fits(data: DatasetDescription, folds: int) -> bool:
    """Returns whether copies of the rows for all folds are small, and each class or value may be in each fold."""
    rows = data.rows["train"] + data.rows["valid"]
    width = len(data.numeric) + len(data.categorical) + len(data.targets) + 3
    return rows * width * 4 * folds <= _MOST_BYTES and rows >= 10 * folds


def pooled(dataset: str) -> Rows:
    """Returns the train rows followed by the valid rows."""
    parts = [read_split(dataset, split).whole() for split in ("train", "valid")]
    return Rows(
        num=np.concatenate([part.num for part in parts]),
        cat=np.concatenate([part.cat for part in parts]),
        target=np.concatenate([part.target for part in parts]),
        rows=np.concatenate([part.rows for part in parts]),
    )


def fold_numbers(target: Array, task: Task, folds: int, seed: int) -> Array:
    """Returns the fold of each row, int[n]: sizes differ by one at most, and classes have equal shares in each."""
    order = np.random.default_rng(seed).permutation(len(target))
    if target.ndim == 1:  # also a regression's values: each fold has small and large ones
        order = order[np.argsort(target[order], kind="stable")]
    if task == "regression":  # neighbours in value are dealt to the folds in a random order
        random = np.random.default_rng(seed + 1)
        blocks = [random.permutation(folds) for _ in range(-(-len(target) // folds))]
        dealt = np.concatenate(blocks)[: len(target)]
    else:
        dealt = np.arange(len(target)) % folds
    found = np.empty(len(target), np.int64)
    found[order] = dealt
    return found


def write_fold(folder: Path, data: DatasetDescription, rows: Rows, held_out: Array | None) -> None:
    """Writes a dataset whose valid rows are those in the mask `held_out`, and whose train rows are the others. None:
    all rows are train rows. What an interrupted attempt left is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    chosen = {"train": np.arange(len(rows))}
    if held_out is not None:
        chosen = {"train": np.flatnonzero(~held_out), "valid": np.flatnonzero(held_out)}
    names = [column.name for column in data.categorical]
    for split, at in chosen.items():
        part = Rows(num=rows.num[at], cat=rows.cat[at], target=rows.target[at], rows=rows.rows[at])
        write_rows(folder / split, 0, part)
        for index in range(count_parts(len(at))):
            seal_part(folder / split, index, len(at), data.numeric, names)
    splits = {name: SplitDescription(rows=len(at), parts=count_parts(len(at))) for name, at in chosen.items()}
    write_dataset(folder, replace(data, splits=splits))


# Greedy selection with repetition after Caruana et al. (2004): begin with the best model, add the one that improves the
# mean of all added so far most, and keep the best mean on the way.
def choose_weights(
    margins: Mapping[str, Array], goodness: Callable[[Array], float], *, blend: bool = True
) -> dict[str, float]:
    """Returns the weight of each chosen model, the largest first; they add up to 1. `goodness` of margins: higher is
    better."""
    alone = {name: goodness(margin) for name, margin in margins.items()}
    first = max(alone, key=lambda name: alone[name])
    taken, total = Counter([first]), margins[first].astype("float64")
    best, chosen = alone[first], Counter(taken)
    for count in range(1, _ROUNDS if blend and len(margins) > 1 else 1):
        allowed = [name for name in margins if name in taken or len(taken) < MOST_MEMBERS]
        tried = {name: goodness((total + margins[name]) / (count + 1)) for name in allowed}
        name = max(tried, key=lambda each: tried[each])
        taken[name] += 1
        total = total + margins[name]
        if tried[name] > best:
            best, chosen = tried[name], Counter(taken)
    return {name: count / chosen.total() for name, count in chosen.most_common()}


if __name__ == "__main__":
    main()
