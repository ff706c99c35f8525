"""The duties that report what waits for a person: requests that do not fit a model's columns, rollouts that are held or
cannot be recorded, and frozen processes (those that the supervisor has replaced, and the supervisor itself)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from serin.errors import NameInvalid
from serin.formats.reason import utc
from serin.host.state import read_stack
from serin.host.watchdog import REPORTED_S, SILENT_S, is_stopped, read_replaced, silent_for_s
from serin.monitoring.alerts.alert import Alert, Alerts, Kind, Severity
from serin.monitoring.alerts.book import read_alerts
from serin.monitoring.history.read import HistoryPoint, read_history
from serin.rollout.decide.state import Hold
from serin.rollout.run.status import ModelStatus, problems
from serin.spec.names import is_model_name
from serin.store.artifacts import Release
from serin.watcher.duty import Duty
from serin.watcher.served import watched_statuses

LOOK_S: Final = 600.0
_MANY, _FEW = 0.05, 0.01  # of the requests: reported from the one on, until it is below the other
_AT_LEAST: Final = 20  # requests: a client that is being tried out is not reported
_PASSES_S: Final = 60.0  # a hold that ends by itself is reported when it has lasted for so long
_SUPERVISOR: Final = "supervisor"


class RefusalsDuty(Duty):
    """Looks at the last ten minutes of the history. It keeps no state: the book knows what is open."""

    name, every_s = "refusals", 30.0

    def __init__(self, home: Path, alerts: Alerts, state: Path | None = None) -> None:
        """`state`: the home with the history; None: `home`."""
        self._home, self._alerts, self._state = home, alerts, state or home

    def tick(self, now: float) -> None:
        for model in watched_statuses(self._home):
            if model.live_release is None:
                self._alerts.resolve(refusal_key(model.name), now)
                continue
            view = read_history(self._state, model.name, now - LOOK_S, now, arms=False)
            live = model.live_release.name
            points = [point for each in view.series for point in each.points] if view else []
            alert = refusal_alert(model.name, live, points)
            if alert is not None:
                self._alerts.fire(alert, now)
            elif is_over(points):
                self._alerts.resolve(refusal_key(model.name), now)


def refusal_key(model: str) -> str:
    return f"{model}/data/refused"


def is_over(points: Sequence[HistoryPoint]) -> bool:
    """Whether requests are accepted again. Without requests nothing is known."""
    requests, refused = _sums(points)
    return requests > 0 and refused < _FEW * requests


def refusal_alert(model: str, release: str, points: Sequence[HistoryPoint]) -> Alert | None:
    """The alert about the requests of the last ten minutes; None when too few of them were refused."""
    requests, refused = _sums(points)
    if refused < _AT_LEAST or refused < _MANY * requests:
        return None
    since = min(point.t for point in points if point.refused)
    share = refused / requests
    return Alert(
        key=refusal_key(model),
        kind="data",
        model=model,
        release=release,
        severity="ticket",
        title=f"{share:.0%} of the requests are refused",
        text=(
            f"{refused:,} of {requests:,} requests within ten minutes did not fit the request columns of {release}, "
            f"the first at {utc(since)}. Has a client changed its schema? Each answer names what does not fit. `serin "
            f"models show {model}` lists the columns, `serin logs {model}` the refused requests with their ids."
        ),
        since=float(since),
        facts={"requests": requests, "refused": refused, "share": share},
    )


def _sums(points: Sequence[HistoryPoint]) -> tuple[int, int]:
    return sum(point.requests for point in points), sum(point.refused for point in points)


class RolloutsDuty(Duty):
    """Looks at the rollouts of this home, or of the hosts that share a store. A pause was requested by a person and is
    not reported. Its only memory is when a hold or a problem was first seen. It needs no disk."""

    name, every_s = "rollouts", 5.0

    def __init__(self, home: Path, alerts: Alerts, state: Path | None = None) -> None:
        """`state`: the home with the alerts; None: `home`."""
        self._home, self._alerts, self._state = home, alerts, state or home
        self._since: dict[str, float] = {}  # by what is held, and why

    def tick(self, now: float) -> None:
        held = {
            _held_key(model.name): (model, Hold(model.rollout.hold))
            for model in watched_statuses(self._home)
            if model.rollout.hold not in (None, Hold.PAUSED)
        }
        found = {name: problem for name, problem in problems(self._home).items() if is_model_name(name)}
        seen = [*(_why(*each) for each in held.values()), *map(_problem_key, found)]
        self._since = {why: self._since.get(why, now) for why in seen}
        for model, hold in held.values():
            since = self._since[_why(model, hold)]
            if not hold.ends_by_itself or now - since >= _PASSES_S:
                self._alerts.fire(_rollout_alert(model, hold, since), now)
        for name, problem in found.items():
            self._alerts.fire(_problem_alert(name, problem, self._since[_problem_key(name)]), now)
        _resolve_others(self._state, self._alerts, "rollout", {*held, *map(_problem_key, found)}, now)


def _held_key(model: str) -> str:
    return f"{model}/rollout/held"


def _problem_key(model: str) -> str:
    return f"{model}/rollout/problem"


def _problem_alert(model: str, problem: str, since: float) -> Alert:
    return Alert(
        key=_problem_key(model),
        kind="rollout",
        model=model,
        severity="page",
        title=f"Rollouts of {model} need a person",
        text=f"{problem}. Its live version is served as before; `serin status` shows the state.",
        since=since,
    )


def _why(model: ModelStatus, hold: Hold) -> str:
    return f"{model.rollout.id} {hold}"


def _rollout_alert(model: ModelStatus, hold: Hold, since: float) -> Alert:
    rollout = model.rollout
    if hold.ends_by_itself:
        then = "It continues by itself when the cause is gone"
    elif hold is Hold.APPROVAL:
        then = f"`serin rollout approve {model.name}` lets it continue"
    else:
        then = f"`serin rollout resume {model.name}` judges it again"
    return Alert(
        key=_held_key(model.name),
        kind="rollout",
        model=model.name,
        release=f"{model.name}-v{rollout.label}",
        severity="ticket",
        title=f"The rollout of version {rollout.label} is held at {rollout.weight_percent:g}% of the traffic",
        text=f"{rollout.reason}. {then}; `serin rollout status {model.name}` shows it, `serin rollout abort "
        f"{model.name}` returns to the live version.",
        since=since,
        facts={"hold": hold.value, "weight_percent": rollout.weight_percent, "rollout": rollout.id},
    )


class ProcessesDuty(Duty):
    """It keeps no state: the supervisor's record and the book know what is open."""

    name, every_s = "processes", 2.0

    def __init__(self, home: Path, alerts: Alerts) -> None:
        self._home, self._alerts = home, alerts

    def tick(self, now: float) -> None:
        found = [*self._replaced(now), *self._supervisor(now)]
        for alert in found:
            self._alerts.fire(alert, now)
        _resolve_others(self._home, self._alerts, "process", {alert.key for alert in found}, now)

    def _replaced(self, now: float) -> Iterator[Alert]:
        """Yields one alert for each process that was replaced in the last minutes."""
        recent = [each for each in read_replaced(self._home) if now - each.t < REPORTED_S]
        for name in sorted({each.name for each in recent}):
            times = [each for each in recent if each.name == name]
            yield _process_alert(
                name,
                severity="ticket",
                title=f"{name} was frozen and was replaced",
                text=f"Process {times[-1].pid}: {times[-1].reason}. Replaced {len(times)} times within "
                f"{REPORTED_S / 60:.0f} minutes. `serin status` and the log of the process show how it is now.",
                since=times[0].t,
            )

    def _supervisor(self, now: float) -> Iterator[Alert]:
        stack = read_stack(self._home)
        if stack is None or not stack.is_alive:
            return
        pid = stack.supervisor_pid
        if not is_stopped(pid) and silent_for_s(stack.home, pid) <= 5 * SILENT_S:
            return
        yield _process_alert(
            _SUPERVISOR,
            severity="page",
            title="the supervisor is frozen",
            text=f"Process {pid} is stopped or hangs. Models are served, but no process that ends is started again. "
            f"`kill -CONT {pid}` lets it continue; `serin down` and `serin up` replace it.",
            since=now,
        )


def _process_alert(name: str, *, severity: Severity, title: str, text: str, since: float) -> Alert:
    try:
        model, release = Release.parse(name).model, name
    except NameInvalid:
        model, release = "", ""
    return Alert(
        key=f"{model or 'stack'}/process/{name}",
        kind="process",
        model=model,
        release=release,
        severity=severity,
        title=title,
        text=text,
        since=since,
    )


def _resolve_others(home: Path, alerts: Alerts, kind: Kind, keys: set[str], now: float) -> None:
    """Ends the open alerts of this kind that are not among `keys`."""
    for record in read_alerts(home, resolved=0, now=now).open:
        if record.alert.kind == kind and record.alert.key not in keys:
            alerts.resolve(record.alert.key, now)
