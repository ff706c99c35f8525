"""Grows trees round by round, in one process or in a team, with checkpoints in between. Does not import torch.

XGBoost's random state (subsample, colsample_*) cannot be saved. So a run that samples consists of intervals of rounds,
each begun from the saved trees with its own seed: after an interruption it ends with the same trees, bit for bit. To
begin one, XGBoost asks all trees so far for every row. So intervals become longer: all of them together then cost about
three times the last one, and an interruption loses a third of the rounds at most.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.errors import Preempted
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.machine.hardware import core_count
from serin.models.trees import load_xgboost
from serin.training.data.tree_matrix import ALL, Share, quantile_matrix, target_unit
from serin.training.launch.job import TrainingJob, saved_steps
from serin.training.launch.progress import tell
from serin.training.results.tree_checkpoints import Grown, TreeCheckpoints

STRETCH_ROUNDS = 50  # of the first intervals of a run that samples; changing it changes the trees
PATIENCE_ROUNDS = 50  # without a better valid metric, when training.patience is not set
_TOLD_EVERY_S = 1.0
_CELLS_WORTH_THREADS = 200_000
_DEFAULTS = {"eta": 0.1, "max_depth": 6}
_OBJECTIVE = {"binary": "binary:logistic", "multiclass": "multi:softprob", "regression": "reg:squarederror"}
_METRIC = {"binary": "auc", "multiclass": "mlogloss", "regression": "rmse"}
_SAMPLING = ("subsample", "colsample_bytree", "colsample_bylevel", "colsample_bynode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """This process among those that grow the same trees. `agree`: whether any of them says so; all of them ask."""

    share: Share = ALL
    device: str | None = None  # None: as the job says
    agree: Callable[[bool], bool] = bool

    @property
    def leads(self) -> bool:
        return self.share.index == 0


ALONE = Team()


def grow_trees(
    job: TrainingJob,
    folder: Path,
    stop_asked: Callable[[], bool],
    team: Team = ALONE,
    *,
    until: float = math.inf,
) -> tuple[Grown, int]:
    """Returns the trees, and the round from which this attempt began. Raises Preempted."""
    checkpoints = TreeCheckpoints(folder)
    grown = checkpoints.newest(lambda text: tell(folder, "note", text=text)) or Grown()
    run, first = _Run(job, read_dataset(job.dataset), folder, team, until), grown.rounds

    def stop() -> bool:
        return team.agree(stop_asked())

    run.tell_start(grown)
    while grown.rounds < job.model.rounds and not run.has_enough(grown):
        grown = run.grow(grown, stop)
        stopped = stop()
        if team.leads and not (stopped and run.samples and interval(grown.rounds)[0] != grown.rounds):
            checkpoints.save(grown)
            if not stopped:
                tell(folder, "checkpoint", step=grown.rounds)
        if stopped:
            team.agree(False)  # they wait for the one that saves
            raise Preempted(step=max(saved_steps(folder), default=0), folder=folder)
    return grown, first


class _Run:
    """The tables and the settings of one training."""

    def __init__(
        self, job: TrainingJob, data: DatasetDescription, folder: Path, team: Team, until: float
    ) -> None:
        self._job, self._data, self._folder, self._team, self._until = job, data, folder, team, until
        self._xgboost = load_xgboost()
        self.settings = tree_settings(job, data, device=team.device, workers=team.share.count)
        self.samples = any(self.settings.get(name, 1) != 1 for name in _SAMPLING)
        self._unit = target_unit(job, data)
        self._train = self._matrix("train", None)
        self._valid = self._matrix("valid", self._train) if data.rows.get("valid") else None
        every = job.training.checkpoint_every_steps
        self._stretch = STRETCH_ROUNDS if every == "auto" else every
        self._told = time.monotonic()
        self._booster: Any = None

    def tell_start(self, grown: Grown) -> None:
        if not self._team.leads:
            return
        many = f" by {self._team.share.count} workers" if self._team.share.count > 1 else ""
        at = f", resumed after round {grown.rounds:,}" if grown.rounds else ""
        text = (
            f"XGBoost on {self.settings['device']}{many}: {self._data.rows['train']:,} rows, at most "
            f"{self._job.model.rounds:,} rounds{at}"
        )
        tell(self._folder, "note", text=text, pid=os.getpid(), round=grown.rounds)

    def has_enough(self, grown: Grown) -> bool:
        if grown.rounds and time.monotonic() >= self._until:
            return True
        patience = self._job.training.patience or PATIENCE_ROUNDS
        return self._valid is not None and grown.rounds - grown.best_round >= patience

    def grow(self, grown: Grown, stop_asked: Callable[[], bool]) -> Grown:
        """Trains rounds up to the end of the interval, until early stopping, or until asked to stop."""
        booster = self._begun(grown)
        following = (grown.rounds // self._stretch + 1) * self._stretch
        end = min(self._job.model.rounds, interval(grown.rounds)[1] if self.samples else following)
        rounds, best_round, best = grown.rounds, grown.best_round, grown.best
        sign = 1.0 if self.settings["eval_metric"] == "auc" else -1.0
        while rounds < end and not stop_asked():
            booster.update(self._train, rounds)
            rounds += 1
            value = None
            if self._valid is not None:
                value = float(booster.eval_set([(self._valid, "valid")], rounds - 1).rpartition(":")[2])
            if value is None or best is None or sign * value > sign * best:
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

    def _matrix(self, split: str, like: Any) -> Any:
        return quantile_matrix(
            self._job,
            self._data,
            split,
            like=like,
            device=self.settings["device"],
            bins=self.settings.get("max_bin", 256),
            share=self._team.share,
            unit=self._unit,
        )

    def _tell_round(self, rounds: int, value: float | None) -> None:
        now = time.monotonic()
        if now - self._told < _TOLD_EVERY_S or not self._team.leads:
            return
        self._told = now
        unit = 1.0 if self.settings["eval_metric"] != "rmse" else self._unit
        found, text = dict[str, float](), f"round {rounds:,}/{self._job.model.rounds:,}"
        if value is not None:
            metric = self.settings["eval_metric"]
            found = {f"valid_{metric}": float(value * unit)}
            text = f"{text}: valid {metric} {value * unit:.4g}"
        tell(self._folder, "note", text=text, round=rounds, metrics=found)


def interval(rounds: int) -> tuple[int, int]:
    """Returns the first round and the one after the last of the interval that follows after so many rounds."""
    begin, end = 0, STRETCH_ROUNDS
    while end <= rounds:
        begin, end = end, end + max(STRETCH_ROUNDS, end // 2)
    return begin, end


def tree_settings(
    job: TrainingJob, data: DatasetDescription, *, device: str | None = None, workers: int = 1
) -> dict[str, Any]:
    """Returns all settings for XGBoost except the seed of an interval."""
    settings = {
        **_DEFAULTS,
        **job.model.options,
        "objective": _OBJECTIVE[data.task],
        "eval_metric": "logloss" if data.task == "binary" and data.targets else _METRIC[data.task],
        "tree_method": "hist",
        "device": device or ("cuda" if job.gpu else "cpu"),
        "nthread": max(1, _threads(data) // workers),
        "seed": job.training.seed,
        "verbosity": 1,
    }
    return {**settings, "num_class": data.outputs} if data.task == "multiclass" else settings


def _threads(data: DatasetDescription) -> int:
    """Returns the threads; the trees do not depend on them, and a small table is faster with few."""
    cells = data.rows["train"] * (len(data.numeric) + len(data.categorical))
    return core_count() if cells >= _CELLS_WORTH_THREADS else 1
