"""Trains candidates of several kinds one after the other and keeps the best, or a weighted blend of a few.

`python -m serin.training.programs.auto FOLDER PARENT_PID`, started by the launcher for `model.kind: auto`. Every
candidate is an ordinary training in `candidates/NAME/FOLD`, so that an interrupted run finds those that are done. Only
rows that a model was not trained on decide; the test rows are scored once, by what was chosen. With one process a
training runs in this one: a fold of a small table takes less time than importing torch again. How it ended is in
status.json.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serin.errors import LossNotFinite, NetworkUnfit, Preempted, TrainingRefused, WorkerFailed
from serin.formats.dataset import FEATURES, DatasetDescription, SplitDescription, read_dataset, write_dataset
from serin.formats.schema import Task
from serin.formats.shards import Array, Rows, count_parts, read_split, seal_part, write_rows
from serin.formats.trained import read_trained, write_blend, write_trained
from serin.machine import environment
from serin.models.build import open_margins
from serin.models.shape import record_of
from serin.models.trees import load_xgboost, scores
from serin.store.artifacts import Dataset
from serin.training.engine.evaluate import goodness
from serin.training.launch import launcher
from serin.training.launch.job import Status, TrainingJob, result_folder
from serin.training.launch.machines import Machines
from serin.training.launch.progress import tell
from serin.training.parallel.ranks import Ranks
from serin.training.programs import trees, worker
from serin.training.programs.attempt import run_attempt
from serin.training.programs.auto_portfolio import Candidate, candidates
from serin.training.results.judge import judge_scores
from serin.training.results.publish import publish_result

_FAULTS = (LossNotFinite, NetworkUnfit, TrainingRefused, WorkerFailed, torch.OutOfMemoryError)
_FOLDS, _ALL, _CANDIDATES = "folds", "all", "candidates"
_HELD_OUT = "valid"  # the folder of a training that the valid rows of the dataset judge
_LEAST_CANDIDATES = 3  # that a budget must allow on the folds
_MOST_SHARE = 0.25  # of the budget, for growing the trees of one training
_INDEPENDENT = ("random", "stratified")
_MOST_BYTES = 2**28  # of all folds together
MOST_MEMBERS = 4  # each one costs its time in every request
_ROUNDS = 25
Member = tuple[Path, float]
"""A result folder and the weight of its answers."""


def main() -> None:
    run_attempt(train)


def train(job: TrainingJob, folder: Path, stop: threading.Event) -> Status:
    """Runs one attempt to the end. Raises Preempted."""
    data = read_dataset(job.dataset)
    if not data.rows.get("valid"):
        reason = "model.kind: auto chooses by the valid rows, and there are none; set data.split.valid"
        raise TrainingRefused(folder=folder, reason=reason)
    return _Attempt(job, data, folder, stop).train()


class _Attempt:
    def __init__(
        self, job: TrainingJob, data: DatasetDescription, folder: Path, stop: threading.Event
    ) -> None:
        self._job, self._data, self._folder, self._stop = job, data, folder, stop
        self._auto, self._clock = job.model.auto, _Clock(job.model.auto.budget)

    def train(self) -> Status:
        data, folds = self._data, self._choose_folds()
        target = np.concatenate([np.asarray(read_split(fold, "valid").whole().target) for fold in folds])
        fitted = self._fit_candidates(folds)
        margins = {name: each.margins for name, each in fitted.items()}
        judged = {name: goodness(self._judge(target, margin)) for name, margin in margins.items()}
        weights = choose_weights(
            margins, lambda margin: goodness(self._judge(target, margin)), blend=self._auto.ensemble
        )
        self._note("chosen: " + ", ".join(f"{name} {each:.0%}" for name, each in weights.items()))
        blended = sum(weight * margins[name].astype(np.float64) for name, weight in weights.items())
        metrics = {f"valid_{name}": value for name, value in self._judge(target, blended).items()}
        members = self._members(fitted, weights)
        if self._job.test and data.rows.get("test"):
            rows = read_split(self._job.dataset, "test").whole()
            num, cat = np.asarray(rows.num), np.asarray(rows.cat)
            blended = sum(
                weight * open_margins(place)(num, cat).astype(np.float64) for place, weight in members
            )
            found = self._judge(np.asarray(rows.target), blended, errors=True)
            metrics |= {f"test_{name}": value for name, value in found.items()}
        self._publish(members, metrics, {"weights": dict(weights), "valid": judged})
        shutil.rmtree(self._folder / _FOLDS, ignore_errors=True)
        rows_seen = len(fitted) * len(folds) * data.rows["train"]
        return Status(state="done", step=len(fitted), rows=rows_seen, work_s=self._clock.elapsed)

    def _judge(self, target: Array, margin: Any, *, errors: bool = False) -> dict[str, float]:
        answers = scores(np.asarray(margin, np.float32), self._data.task)
        return judge_scores(target, answers, self._data.task, self._data.targets, errors=errors)

    def _note(self, text: str) -> None:
        tell(self._folder, "note", text=text)

    def _choose_folds(self) -> list[Path]:
        """Returns the datasets that every candidate is trained on: as many of the folds as a few candidates can be
        trained on within the budget, which the first training on one shows; or the dataset itself where rows must stay
        in their splits."""
        job, data, count, clock = self._job, self._data, self._auto.folds, self._clock
        if count < 2 or not may_fold(job.dataset, data) or not fits(data, count):
            return [Path(job.dataset)]
        rows, first = pooled(job.dataset), candidates(job, data)[0]
        numbers = fold_numbers(rows.target, data.task, count, job.training.seed)
        folds = [self._folder / _FOLDS / str(number) for number in range(count)]
        write_fold(folds[0], data, rows, numbers == 0)
        chosen = self._folder / _CANDIDATES / "folds"
        if not chosen.exists():  # a resumed run does the same
            load_xgboost()  # the import takes longer than some folds
            began, place = clock.elapsed, self._folder / _CANDIDATES / first.name / "0"
            with suppress(*_FAULTS):  # it will fail again, and be reported then
                fit_one(job, first, folds[0], place, self._stop, most_s=clock.most_s)
            took = max(clock.elapsed - began, 1e-3)
            chosen.parent.mkdir(exist_ok=True)
            chosen.write_text(str(max(1, min(count, int(clock.budget / (_LEAST_CANDIDATES * took))))))
        used = folds[: int(chosen.read_text())]
        if len(used) < count:
            self._note(f"{len(used)} of {count} folds: no time for more within model.auto.budget")
        for number, fold in enumerate(used[1:], start=1):
            write_fold(fold, data, rows, numbers == number)
        return used

    def _fit_candidates(self, folds: Sequence[Path]) -> dict[str, Fitted]:
        """Returns the candidates that could be trained, at least one."""
        job, folder = self._job, self._folder
        fitted: dict[str, Fitted] = {}
        reason, refits = "", self._refits(folds)
        for number, candidate in enumerate(candidates(job, self._data, len(folds))):
            if number >= self._auto.trials or (fitted and not self._clock.allows(fitted.values(), refits)):
                break
            if self._stop.is_set():
                raise Preempted(step=number, folder=folder)
            try:
                place = folder / _CANDIDATES / candidate.name
                done = fit_candidate(job, candidate, folds, place, self._stop, most_s=self._clock.most_s)
            except _FAULTS as error:
                reason = str(error)
                self._note(f"candidate {candidate.name} failed: {reason.splitlines()[0]}")
                continue
            fitted[candidate.name] = done
            self._note(f"candidate {candidate.name}: {done.seconds:.1f} s")
        if not fitted:
            raise TrainingRefused(
                folder=folder, reason=f"every candidate failed, the last one with: {reason}"
            )
        return fitted

    def _refits(self, folds: Sequence[Path]) -> bool:
        """Returns whether what was chosen is trained again on the train and valid rows together. The models of several
        folds are blended instead: each row was seen by most of them."""
        return len(folds) == 1 or not self._auto.ensemble

    def _members(self, fitted: Mapping[str, Fitted], weights: Mapping[str, float]) -> list[Member]:
        """Returns the models of the answer with their weights."""
        if not self._refits(next(iter(fitted.values())).results):
            return [
                (result, weight / len(fitted[name].results))
                for name, weight in weights.items()
                for result in fitted[name].results
            ]
        place = self._folder / _FOLDS / _ALL
        write_fold(place, self._data, pooled(self._job.dataset), None)
        members = []
        for name, weight in weights.items():
            each = fitted[name]
            again = self._folder / _CANDIDATES / name / _ALL
            if len(each.results) > 1 or self._clock.has(each.seconds):
                whole = each.candidate.for_all_rows(each.amount)
                members.append((fit_one(self._job, whole, place, again, self._stop), weight))
            else:
                self._note(f"{name} stays as it is: no time to train it on the valid rows too")
                members.append((each.results[0], weight))
        return members

    def _publish(
        self, members: Sequence[Member], metrics: dict[str, float], choices: dict[str, dict[str, float]]
    ) -> None:
        """Publishes the one that was chosen as if it had been asked for, or the blend."""

        def fill(scratch: Path) -> None:
            if len(members) > 1:
                write_blend(scratch, members, record_of(self._job.model, self._data))
                return
            record, content = read_trained(members[0][0])
            write_trained(scratch, content, record.model_dump(exclude={"weights_sha256"}))

        steps = len(choices["valid"])
        publish_result(
            self._folder,
            fill=fill,
            job=self._job,
            step=steps,
            steps=steps,
            choices=dict(choices),
            metrics=metrics,
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A candidate with its result folder for each fold. `margins`: its answers for the valid rows of all folds, one
    after the other. `amount`: boosting rounds or epochs until it was best, the mean over folds. `seconds`: what all
    folds took."""

    candidate: Candidate
    results: tuple[Path, ...]
    margins: Array
    amount: int
    seconds: float


def fit_candidate(
    job: TrainingJob,
    candidate: Candidate,
    folds: Sequence[Path],
    place: Path,
    stop: threading.Event,
    *,
    most_s: float = math.inf,
) -> Fitted:
    """Trains in `place/0`, `place/1`, ... for each of the folds, or in `place/valid` where it is the dataset itself.
    What an earlier attempt finished is kept. `most_s`: no tree is begun later in a training. Raises the errors of a
    training, and Preempted."""
    results, found, amounts, began = [], [], [], time.monotonic()
    for fold in folds:
        name = _HELD_OUT if fold == Path(job.dataset) else fold.name
        result = fit_one(job, candidate, fold, place / name, stop, most_s=most_s)
        rows = read_split(fold, "valid").whole()
        results.append(result)
        found.append(open_margins(result)(np.asarray(rows.num), np.asarray(rows.cat)))
        amounts.append(_amount(candidate, result))
    mean = max(1, round(sum(amounts) / len(amounts)))
    return Fitted(
        candidate=candidate,
        results=tuple(results),
        margins=np.concatenate(found),
        amount=mean,
        seconds=time.monotonic() - began,
    )


def fit_one(
    job: TrainingJob,
    candidate: Candidate,
    dataset: Path,
    folder: Path,
    stop: threading.Event,
    *,
    most_s: float = math.inf,
) -> Path:
    """Trains on one dataset without scoring test rows; returns the result folder."""
    result = result_folder(folder)
    if result.is_dir():
        return result
    if job.processes > 1:
        devices = tuple((environment.visible_devices() or "").split(",")) if job.gpu else ()
        rows = read_dataset(dataset).rows
        whole = Dataset(path=str(dataset), digest=job.dataset_digest, rows=rows)
        launcher.train(
            candidate.model,
            candidate.training,
            whole,
            folder=folder,
            devices=devices,
            stop=stop,
            test=False,
            machines=Machines(),
        )
        return result
    folder.mkdir(parents=True, exist_ok=True)
    own = TrainingJob(
        model=candidate.model,
        training=candidate.training,
        dataset=str(dataset),
        dataset_digest=job.dataset_digest,
        processes=1,
        gpu=job.gpu,
        test=False,
    )
    if candidate.is_trees:
        status = trees.train(own, folder, stop.is_set, until=time.monotonic() + most_s)
    else:
        device = torch.device("cuda", 0) if job.gpu else torch.device("cpu")
        status = worker.train(own, folder, Ranks(rank=0, size=1, device=device), stop.is_set)
    if status.state != "done":
        raise TrainingRefused(folder=folder, reason=status.reason)
    return result


def _amount(candidate: Candidate, result: Path) -> int:
    """Returns the boosting rounds or the epochs after which the model was best."""
    state = json.loads((result / "state.json").read_text(encoding="utf-8"))
    if candidate.is_trees:
        return int(state["step"])
    return -(-int(state["step"]) // int(state["choices"]["steps_per_epoch"]))


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
