"""A study that survives its process: which settings are tried next, and the results of earlier ones.

Optuna stores it in SQLite or Postgres. A trial whose process is gone is given to another one, which resumes its
training. The study always maximises: a trial's value is higher for the better one. Does not import torch.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import JsonValue

from serin.errors import ExtraMissing
from serin.machine.process import start_ticks
from serin.spec.search import RangeSpec, SearchSpec

_SQLITE_WAITS_S = 60  # for another trial's write
_DIGITS = 6
_AGAIN = "again"  # the trial that this one resumes
_OWNER, _REASON, _METRICS, _SECONDS = "owner", "reason", "metrics", "seconds"
_SIGNS = {"auc": 1.0, "logloss": -1.0, "rmse": -1.0}  # of metrics to maximize and to minimize


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The outcome of one trial."""

    number: int
    state: str  # complete, pruned, failed, running, waiting
    value: float | None
    settings: dict[str, JsonValue]
    metrics: dict[str, float]
    seconds: float | None
    reason: str


class Trial:
    """One set of settings that is being tried."""

    def __init__(self, study: Study, trial: Any, settings: dict[str, JsonValue]) -> None:
        self._study, self._trial, self.settings, self.number = study, trial, settings, int(trial.number)

    def report(self, value: float, step: int) -> bool:
        """Reports an intermediate value; True when the trial is so far behind that it should be stopped."""
        with self._study.lock:
            self._trial.report(value, step)
            return bool(self._trial.should_prune())

    def end(
        self,
        state: str,
        *,
        value: float | None = None,
        metrics: Mapping[str, float] | None = None,
        seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        """Ends the trial. `state`: complete (with its value), pruned or failed."""
        states = _optuna().trial.TrialState
        with self._study.lock:
            self._trial.set_user_attr(_METRICS, dict(metrics or {}))
            self._trial.set_user_attr(_SECONDS, seconds)
            self._trial.set_user_attr(_REASON, reason)
            known = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
            self._study.optuna.tell(self._trial, value if state == "complete" else None, state=known[state])


class Study:
    def __init__(self, *, url: str, name: str, spec: SearchSpec, epochs: int) -> None:
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        connect = {"connect_args": {"timeout": _SQLITE_WAITS_S}} if url.startswith("sqlite") else {}
        try:
            with_driver = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)  # which Serin installs
            self._storage = optuna.storages.RDBStorage(
                with_driver, engine_kwargs={**connect, "pool_pre_ping": True}
            )
        except ImportError as error:
            raise ExtraMissing(package="the driver of SERIN_SEARCH_STORAGE", extra="postgres") from error
        self._spec = spec
        halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        self.optuna: Any = optuna.create_study(
            storage=self._storage,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
            pruner=halving if spec.pruner == "halving" and epochs > 1 else optuna.pruners.NopPruner(),
        )
        self.lock = threading.Lock()

    def close(self) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def take_over(self) -> list[int]:
        """Queues trials again whose process is gone. They keep their settings, not their number."""
        states = _optuna().trial.TrialState
        trials = self.optuna.get_trials(deepcopy=False)
        taken_over = {trial.user_attrs.get(_AGAIN) for trial in trials}
        found = []
        for trial in trials:
            if trial.state != states.RUNNING or _is_alive(trial.user_attrs.get(_OWNER)):
                continue
            if trial.number not in taken_over and set(trial.params) == set(self._spec.space):
                self.optuna.enqueue_trial(trial.params, user_attrs={_AGAIN: trial.number})
            self.optuna.tell(trial.number, state=states.FAIL)
            found.append(trial.number)
        return found

    def ask(self) -> Trial | None:
        """Returns the next trial; None when enough have been tried."""
        with self.lock:
            waiting = any(tried.state == "waiting" for tried in self._all())
            if not waiting and self._spec.sampler == "grid":
                waiting = self._enqueue_grid()
            if not waiting and (self._spec.sampler == "grid" or self.begun() >= self._spec.trials):
                return None
            self.optuna.sampler = self._sampler(len(self._all()))
            trial = self.optuna.ask()
            trial.set_user_attr(_OWNER, _me())
            settings = {path: _suggest(trial, path, values) for path, values in self._spec.space.items()}
            return Trial(self, trial, settings)

    def begun(self) -> int:
        """Counts the started trials; one that was taken over counts once."""
        return sum(tried.state != "waiting" for tried in self.tried())

    def planned(self) -> int:
        if self._spec.sampler != "grid":
            return self._spec.trials
        return min(self._spec.trials, len(list(itertools.product(*self._grid().values()))))

    def tried(self) -> list[Tried]:
        """Returns all trials except those that another one resumed, and those that died before they had settings."""
        found = self.optuna.get_trials(deepcopy=False)
        again = {trial.user_attrs.get(_AGAIN) for trial in found}
        return [
            one
            for one in self._all()
            if one.number not in again
            and (one.state != "failed" or set(one.settings) == set(self._spec.space))
        ]

    def importance(self) -> dict[str, float]:
        """Returns the importance of each setting for good trials (PED-ANOVA); empty while too few are complete."""
        optuna = _optuna()
        values = {
            trial.value for trial in self.optuna.trials if trial.state == optuna.trial.TrialState.COMPLETE
        }
        if len(values) < 4:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
        found = optuna.importance.get_param_importances(self.optuna, evaluator=evaluator)
        return {str(path): float(share) for path, share in found.items()}

    def _all(self) -> list[Tried]:
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
        return [
            Tried(
                number=trial.number,
                state=names.get(trial.state.name, "waiting"),
                value=trial.value,
                settings={
                    path: _plain(self._spec.space[path], value) for path, value in trial.params.items()
                },
                metrics=trial.user_attrs.get(_METRICS, {}),
                seconds=trial.user_attrs.get(_SECONDS),
                reason=trial.user_attrs.get(_REASON, ""),
            )
            for trial in self.optuna.get_trials(deepcopy=False)
        ]

    def _sampler(self, number: int) -> Any:
        """Creates a sampler for each trial from the seed and its number, so that a killed search continues
        identically."""
        samplers = _optuna().samplers
        seed = (self._spec.seed * 1_000_003 + number) % 2**32
        if self._spec.sampler == "tpe":
            return samplers.TPESampler(seed=seed, multivariate=True)
        return samplers.RandomSampler(seed=seed)

    def _grid(self) -> dict[str, list[Any]]:
        values = self._spec.space.items()
        return {
            path: [json.dumps(choice) for choice in one.choice]
            if one.choice is not None
            else list(range(int(one.ends[0]), int(one.ends[1]) + 1))
            for path, one in values
        }

    def _enqueue_grid(self) -> bool:
        """Queues all combinations once, up to the number of trials."""
        if self.optuna.trials:
            return False
        grid = self._grid()
        for combination in itertools.islice(itertools.product(*grid.values()), self._spec.trials):
            self.optuna.enqueue_trial(dict(zip(grid, combination, strict=True)))
        return True


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise ExtraMissing(package="optuna", extra="search") from error
    found: ModuleType = optuna
    return found


def _suggest(trial: Any, path: str, values: RangeSpec) -> JsonValue:
    if values.choice is not None:  # as JSON: the storage cannot hold lists
        return _plain(
            values, trial.suggest_categorical(path, [json.dumps(choice) for choice in values.choice])
        )
    low, high = values.ends
    if values.integer is not None:
        return int(trial.suggest_int(path, int(low), int(high)))
    return _plain(values, trial.suggest_float(path, low, high, log=values.log is not None))


def _plain(values: RangeSpec, kept: Any) -> JsonValue:
    """Returns values as a person would write them, so that a trial uses exactly the values of the chosen spec."""
    if values.choice is not None:
        found: JsonValue = json.loads(kept)
        return found
    if values.integer is not None:
        return int(kept)
    low, high = values.ends
    return min(max(float(f"{kept:.{_DIGITS}g}"), low), high)


def _me() -> str:
    return json.dumps([socket.gethostname(), os.getpid(), start_ticks(os.getpid())])


def _is_alive(owner: str | None) -> bool:
    """Returns whether the owner is alive. A process on another machine cannot be checked: it keeps its trial."""
    if owner is None:
        return False
    host, pid, began = json.loads(owner)
    return bool(host != socket.gethostname() or start_ticks(pid) == began)


def objective(metrics: Mapping[str, float]) -> float | None:
    """What a search maximizes: the AUC of the valid rows where there is one, else the negated loss. None when the valid
    rows were not measured."""
    name = objective_name(metrics)
    return None if not name else _SIGNS[name.removeprefix("valid_")] * metrics[name]


def objective_name(metrics: Mapping[str, float]) -> str:
    return next((f"valid_{name}" for name in _SIGNS if f"valid_{name}" in metrics), "")
