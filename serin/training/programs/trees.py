"""Trains XGBoost on the same shards, with its own checkpoints. Does not import torch.

`python -m serin.training.programs.trees FOLDER PARENT_PID`, started by the launcher. How it ended is in status.json.

XGBoost's random state (subsample, colsample_*) cannot be saved. So a run that samples consists of intervals of rounds,
each begun from the saved trees with its own seed: after an interruption it ends with the same trees, bit for bit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from serin.errors import Preempted, SerinError
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.shards import Array, read_split
from serin.formats.trained import TREES, write_trained
from serin.machine.hardware import core_count
from serin.machine.parent_death import die_with_parent
from serin.models.trees import column_types, joined, load_xgboost, margins, read_booster, scores
from serin.training.data.class_weights import class_weights
from serin.training.launch.job import TrainingJob, read_job
from serin.training.launch.progress import tell
from serin.training.launch.run_lock import only_one
from serin.training.launch.status import Status, write_status
from serin.training.results.judge import judge_scores
from serin.training.results.publish import publish_result
from serin.training.results.tree_checkpoints import Grown, TreeCheckpoints

STRETCH_ROUNDS = 50  # of a run that samples; changing it changes the trees
PATIENCE_ROUNDS = 50  # without a better valid metric, when training.patience is not set
_TOLD_EVERY_S = 1.0
_CELLS_WORTH_THREADS = 200_000
_FORMER_WORKER_ENDS_S = 60.0
_DEFAULTS = {"eta": 0.1, "max_depth": 6}
_OBJECTIVE = {"binary": "binary:logistic", "multiclass": "multi:softprob", "regression": "reg:squarederror"}
_METRIC = {"binary": "auc", "multiclass": "mlogloss", "regression": "rmse"}
_SAMPLING = ("subsample", "colsample_bytree", "colsample_bylevel", "colsample_bynode")


def main() -> None:
    folder = Path(sys.argv[1])
    die_with_parent(int(sys.argv[2]))
    asked = False

    def ask(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    job = read_job(folder)
    try:
        with only_one(folder / "worker.lock", wait_s=_FORMER_WORKER_ENDS_S):
            status = train(job, folder, lambda: asked)
    except Preempted as stopped:
        status = Status(state="preempted", step=stopped.fields["step"])
    except SerinError as error:
        status = Status(state="refused", reason=str(error))
    write_status(folder, status)
    sys.exit({"done": 0, "preempted": Preempted.exit_code}.get(status.state, 1))


def train(job: TrainingJob, folder: Path, stop_asked: Callable[[], bool]) -> Status:
    """Runs one attempt to the end. Raises Preempted."""
    xgboost = load_xgboost()
    data = read_dataset(job.dataset)
    checkpoints, began = TreeCheckpoints(folder), time.monotonic()
    grown = checkpoints.newest(lambda text: tell(folder, "note", text=text)) or Grown()
    try:
        run = _Run(job, data, folder, xgboost)
        run.tell_start(grown)
        first = grown.rounds
        while grown.rounds < job.model.rounds and not run.has_enough(grown):
            grown = run.grow(grown, stop_asked)
            if stop_asked():
                if not run.samples or grown.rounds % STRETCH_ROUNDS == 0:
                    checkpoints.save(grown)
                raise Preempted(step=checkpoints.newest_round(), folder=folder)
            checkpoints.save(grown)
            tell(folder, "checkpoint", step=grown.rounds)
        run.finish(grown)
    except xgboost.core.XGBoostError as error:
        reason = f"XGBoost: {_first_line(str(error))}"
        return Status(state="refused", reason=reason)
    rows = (grown.rounds - first) * data.rows["train"]
    return Status(state="done", step=grown.rounds, rows=rows, work_s=time.monotonic() - began)


class _Run:
    """The tables and the settings of one training."""

    def __init__(self, job: TrainingJob, data: DatasetDescription, folder: Path, xgboost: Any) -> None:
        self._job, self._data, self._folder, self._xgboost = job, data, folder, xgboost
        self.settings = tree_settings(job, data)
        self.samples = any(self.settings.get(name, 1) != 1 for name in _SAMPLING)
        self._train = self._matrix("train", None)
        self._valid = self._matrix("valid", self._train) if data.rows.get("valid") else None
        every = job.training.checkpoint_every_steps
        self._stretch = STRETCH_ROUNDS if self.samples or every == "auto" else every
        self._told = time.monotonic()
        self._booster: Any = None

    def tell_start(self, grown: Grown) -> None:
        at = f", resumed after round {grown.rounds:,}" if grown.rounds else ""
        text = (
            f"XGBoost on {self.settings['device']}: {self._data.rows['train']:,} rows, at most "
            f"{self._job.model.rounds:,} rounds{at}"
        )
        tell(self._folder, "note", text=text, pid=os.getpid(), round=grown.rounds)

    def has_enough(self, grown: Grown) -> bool:
        patience = self._job.training.patience or PATIENCE_ROUNDS
        return self._valid is not None and grown.rounds - grown.best_round >= patience

    def grow(self, grown: Grown, stop_asked: Callable[[], bool]) -> Grown:
        """Trains rounds up to the end of the interval, until early stopping, or until asked to stop."""
        booster = self._begun(grown)
        end = min(self._job.model.rounds, (grown.rounds // self._stretch + 1) * self._stretch)
        rounds, best_round, best = grown.rounds, grown.best_round, grown.best
        while rounds < end and not stop_asked():
            booster.update(self._train, rounds)
            rounds += 1
            value = self._measure(booster, rounds)
            if value is None or best is None or self._better(value, best):
                best_round, best = rounds, value
            self._tell_round(rounds, value)
            if self.has_enough(Grown(rounds=rounds, best_round=best_round)):
                break
        return Grown(rounds=rounds, trees=bytes(booster.save_raw("ubj")), best_round=best_round, best=best)

    def _begun(self, grown: Grown) -> Any:
        """Returns a booster in the state `grown`; the one of the last interval when nothing is sampled."""
        if self._booster is not None and not self.samples:
            return self._booster
        seed = self._job.training.seed + (grown.rounds if self.samples else 0)
        self._booster = self._xgboost.Booster(
            {**self.settings, "seed": seed},
            [self._train, *([self._valid] if self._valid else [])],
            model_file=bytearray(grown.trees) if grown.trees else None,
        )
        return self._booster

    def finish(self, grown: Grown) -> None:
        """Measures the trees up to the best round like every other model."""
        booster = read_booster(grown.trees)[: grown.best_round]
        metrics: dict[str, float] = {}
        for split in ("valid", "test") if self._job.test else ("valid",):
            if self._data.rows.get(split):
                found = _judge(booster, self._job, self._data, split)
                metrics |= {f"{split}_{name}": value for name, value in found.items()}
        shape = {
            "numeric": len(self._data.numeric),
            "sizes": sizes_of(self._data),
            "outputs": self._data.outputs,
        }
        record = {
            "model": self._job.model.model_dump(),
            "shape": shape,
            "task": self._data.task,
            "file": TREES,
        }
        trees = bytes(booster.save_raw("ubj"))
        publish_result(
            self._folder,
            fill=lambda scratch: write_trained(scratch, trees, record),
            job=self._job,
            step=grown.best_round,
            steps=grown.rounds,
            choices={**self.settings, "xgboost": self._xgboost.__version__},
            metrics=metrics,
        )

    def _matrix(self, split: str, like: Any) -> Any:
        return quantiles(self._xgboost, self._job, self._data, split, like, self.settings)

    def _measure(self, booster: Any, rounds: int) -> float | None:
        if self._valid is None:
            return None
        return float(booster.eval_set([(self._valid, "valid")], rounds - 1).rpartition(":")[2])

    def _better(self, value: float, best: float) -> bool:
        return value > best if self.settings["eval_metric"] == "auc" else value < best

    def _tell_round(self, rounds: int, value: float | None) -> None:
        now = time.monotonic()
        if now - self._told < _TOLD_EVERY_S:
            return
        self._told = now
        found = "" if value is None else f": valid {self.settings['eval_metric']} {value:.4f}"
        tell(self._folder, "note", text=f"round {rounds:,}/{self._job.model.rounds:,}{found}", round=rounds)


def tree_settings(job: TrainingJob, data: DatasetDescription) -> dict[str, Any]:
    """Returns all settings for XGBoost except the seed of an interval."""
    settings = {
        **_DEFAULTS,
        **job.model.options,
        "objective": _OBJECTIVE[data.task],
        "eval_metric": "logloss" if data.task == "binary" and data.targets else _METRIC[data.task],
        "tree_method": "hist",
        "device": "cuda" if job.gpu else "cpu",
        "nthread": _threads(data),
        "seed": job.training.seed,
        "verbosity": 1,
    }
    return {**settings, "num_class": data.outputs} if data.task == "multiclass" else settings


def quantiles(
    xgboost: Any, job: TrainingJob, data: DatasetDescription, split: str, like: Any, settings: dict[str, Any]
) -> Any:
    """Returns a split in XGBoost's compact form, read a part at a time: never as one float32 array."""
    arrays = read_split(job.dataset, split)
    classes = 2 if data.task == "binary" else len(data.classes or ())
    weights = (
        None
        if data.task == "regression" or split != "train"
        else class_weights(job.training.class_weights, arrays.target, classes)
    )
    types = column_types(len(data.numeric), sizes_of(data))

    class Parts(xgboost.DataIter):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts: Iterator[tuple[Array, Array, Array]] = iter(())

        def reset(self) -> None:
            self.parts = zip(arrays.num, arrays.cat, arrays.target, strict=True)

        def next(self, input_data: Callable[..., Any]) -> bool:
            part = next(self.parts, None)
            if part is None:
                return False
            num, cat, target = part
            each = None if weights is None else np.asarray(weights, np.float32)[np.asarray(target, np.int64)]
            input_data(data=joined(num, cat), label=np.asarray(target), weight=each, feature_types=types)
            return True

    bins = settings.get("max_bin", 256)
    return xgboost.QuantileDMatrix(Parts(), ref=like, max_bin=bins, enable_categorical=True)


def _judge(booster: Any, job: TrainingJob, data: DatasetDescription, split: str) -> dict[str, float]:
    arrays, sizes = read_split(job.dataset, split), sizes_of(data)
    margin = [margins(booster, num, cat, sizes) for num, cat in zip(arrays.num, arrays.cat, strict=True)]
    found = scores(np.concatenate(margin), data.task)
    return judge_scores(np.concatenate(arrays.target), found, data.task, data.targets)


def _threads(data: DatasetDescription) -> int:
    """Returns the threads; the trees do not depend on them, and a small table is faster with few."""
    cells = data.rows["train"] * (len(data.numeric) + len(data.categorical))
    return core_count() if cells >= _CELLS_WORTH_THREADS else 1


def sizes_of(data: DatasetDescription) -> list[int]:
    return [column.size for column in data.categorical]


def _first_line(text: str) -> str:
    """Returns the message of an XGBoost error, which begins with a time and ends with a stack."""
    lines = [line for line in text.splitlines() if line.strip() and "Stack trace" not in line]
    return lines[0].partition("] ")[2] or lines[0] if lines else "an error without a message"


if __name__ == "__main__":
    main()
