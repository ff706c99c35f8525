"""The duty that reports a rollout that is held or cannot be recorded: it waits until somebody looks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from serin.machine import environment
from serin.monitoring.alerts.alert import Alert, Alerts
from serin.monitoring.alerts.read import read_alerts
from serin.rollout.decide.state import Hold
from serin.rollout.run.access import HomeRollouts, Rollouts, StoreRollouts
from serin.rollout.run.status import ModelStatus, problems, statuses
from serin.spec.names import is_model_name
from serin.store.artifacts import Release
from serin.store.open import check_answers, open_objects
from serin.watcher.duty import Duty
from serin.watcher.served import has_agent

_PASSES_S: Final = 60.0  # a hold that ends by itself is reported when it has lasted for so long
_STORE_S: Final = 2.0  # the other duties wait with this one


class RolloutsDuty(Duty):
    """Looks at the rollouts of this home, or of the hosts that share a store. A pause was requested by a person and is
    not reported. Its only memory is when a hold or a problem was first seen. It needs no disk."""

    name, every_s = "rollouts", 5.0

    def __init__(self, home: Path, alerts: Alerts) -> None:
        self._home, self._alerts = home, alerts
        self._shared: StoreRollouts | None = None
        self._since: dict[str, float] = {}  # by what is held, and why

    def tick(self, now: float) -> None:
        held = {
            _key(model.name): (model, Hold(model.rollout.hold))
            for model in statuses(self._rollouts())
            if model.rollout.hold not in (None, Hold.PAUSED)
        }
        found = {name: problem for name, problem in problems(self._home).items() if is_model_name(name)}
        seen = [*(_why(*each) for each in held.values()), *map(_problem_key, found)]
        self._since = {why: self._since.get(why, now) for why in seen}
        for model, hold in held.values():
            since = self._since[_why(model, hold)]
            if not hold.ends_by_itself or now - since >= _PASSES_S:
                self._alerts.fire(_alert(model, hold, since), now)
        for name, problem in found.items():
            self._alerts.fire(_problem_alert(name, problem, self._since[_problem_key(name)]), now)
        told = {*held, *map(_problem_key, found)}
        for each in read_alerts(self._home, resolved=0, now=now).open:
            if each.alert.kind == "rollout" and each.alert.key not in told:
                self._alerts.resolve(each.alert.key, now)

    def _rollouts(self) -> Rollouts:
        """Raises StoreUnreachable."""
        if not has_agent(self._home):
            return HomeRollouts(self._home)
        url = environment.store_url()
        check_answers(url, _STORE_S)
        if self._shared is None:
            self._shared = StoreRollouts(open_objects(url))
        return self._shared


def _key(model: str) -> str:
    return f"{model}/rollout/held"


def _problem_key(model: str) -> str:
    return f"{model}/rollout/problem"


def _problem_alert(model: str, problem: str, since: float) -> Alert:
    return Alert(
        key=_problem_key(model),
        kind="rollout",
        model=model,
        release="",
        severity="page",
        title=f"Rollouts of {model} need a person",
        text=f"{problem}. Its live version is served as before; `serin status` shows the state.",
        since=since,
    )


def _why(model: ModelStatus, hold: Hold) -> str:
    return f"{model.rollout.id} {hold}"


def _alert(model: ModelStatus, hold: Hold, since: float) -> Alert:
    rollout = model.rollout
    if hold.ends_by_itself:
        then = "It continues by itself when the cause is gone"
    elif hold is Hold.APPROVAL:
        then = f"`serin rollout approve {model.name}` lets it continue"
    else:
        then = f"`serin rollout resume {model.name}` judges it again"
    return Alert(
        key=_key(model.name),
        kind="rollout",
        model=model.name,
        release=Release(model=model.name, version=rollout.version).name,
        severity="ticket",
        title=f"The rollout of version {rollout.version} is held at {rollout.weight_percent:g}% of the traffic",
        text=f"{rollout.reason}. {then}; `serin rollout status {model.name}` shows it, `serin rollout abort "
        f"{model.name}` returns to the live version.",
        since=since,
        facts={"hold": hold.value, "weight_percent": rollout.weight_percent, "rollout": rollout.id},
    )
