"""The duty that compares what clients got with what the live versions promise, and acts on a fast burn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from serin.errors import SerinError
from serin.monitoring.alerts.alert import AlertRecord, Alerts
from serin.monitoring.alerts.book import read_alerts
from serin.monitoring.history.read import counts_since, window_sums
from serin.monitoring.objectives.burn import (
    BEFORE_S,
    FIRST_S,
    PAIRS,
    PERIOD_S,
    QUIET_S,
    SEVERITIES,
    WINDOWS,
    Objective,
    Pair,
    Row,
    Share,
    alert_key,
    blame,
    budget_left,
    burning_since,
    firing_pair,
    objective_alert,
)
from serin.monitoring.objectives.read import ObjectivesState, counted_for, share_of, shares_of
from serin.monitoring.rollbacks import read_rollbacks
from serin.rollout.run.status import ModelStatus
from serin.spec.objectives import ObjectivesSpec
from serin.store.artifacts import Release
from serin.watcher.auto_rollback import AutoRollback
from serin.watcher.duty import Commit, Duty, look_at_each, nothing
from serin.watcher.history_duty import Promise, Promises
from serin.watcher.served import watched_statuses

_LOOK_BACK_S: Final = max(WINDOWS) + BEFORE_S + FIRST_S
_REFRESH_S: Final = 60.0  # the text of an open alert is this old at most


class ObjectivesDuty(Duty):
    """Looks at every model that is or was served here. Its only memory are the alert book and the files it writes."""

    name, every_s = "objectives", 10.0

    def __init__(
        self,
        home: Path,
        alerts: Alerts,
        promises: Promises,
        state: Path | None = None,
        commit: Commit = nothing,
    ) -> None:
        """`state`: the home with the history and what it knows; None: `home`."""
        self._home, self._alerts, self._promises, self._state = home, alerts, promises, state or home
        self._rollback = AutoRollback(home, self._state, commit)

    def tick(self, now: float) -> None:
        found = read_alerts(self._state, resolved=0, now=now).open
        open_alerts = {each.alert.key: each for each in found if each.alert.kind == "objective"}
        models = watched_statuses(self._home)
        names = {model.name for model in models}
        for key in [key for key, each in open_alerts.items() if each.alert.model not in names]:
            self._alerts.resolve(key, now)
        look_at_each(models, lambda model: self._look(model, open_alerts, now), lambda _: None)

    def _look(self, model: ModelStatus, open_alerts: Mapping[str, AlertRecord], now: float) -> None:
        self._rollback.settle(model, now)
        promise = Promise() if model.live is None else self._promises.of(model.name, model.live)
        objectives = _objectives(promise)
        release = "" if model.live_release is None else model.live_release.name
        state = ObjectivesState(model=model.name, release=release, objectives=objectives)
        if model.live is not None and state != ObjectivesState.of(self._state, model.name):
            state.save(self._state)
        fired = set()
        for objective, pair, shares in self._burning(model.name, objectives, now):
            key = alert_key(model.name, objective.name, pair.severity)
            fired.add(key)
            acts = promise.rollback and pair.severity == "page"
            if acts or key not in open_alerts or not 0 <= now - open_alerts[key].seen < _REFRESH_S:
                self._fire(model, objective, pair, shares, now, acts=acts)
        for key, record in open_alerts.items():
            quiet = not 0 <= now - record.seen < QUIET_S
            if record.alert.model == model.name and key not in fired and quiet:
                self._alerts.resolve(key, now)

    def _burning(
        self, model: str, objectives: tuple[Objective, ...], now: float
    ) -> Iterator[tuple[Objective, Pair, Mapping[int, Share]]]:
        """Yields each objective that burns too fast, with its most urgent pair.

        Three days are only read when the last six hours could be a part of a ticket: they take most of the time.
        """
        sums = dict(window_sums(self._state, model, now, WINDOWS[:-1]))
        days, hours = WINDOWS[-1], WINDOWS[-2]
        for objective in objectives:
            slow = objective.burn(shares_of(objective, sums)[hours]) >= PAIRS[-1].threshold / 2
            if slow and days not in sums:
                sums |= window_sums(self._state, model, now, (days,))
            shares = {days: Share(), **shares_of(objective, sums)}
            if firing_pair(objective, shares) is None:
                continue
            age_s = counted_for(self._state, model, now)
            pairs = (firing_pair(objective, shares, age_s, severity=each) for each in SEVERITIES)
            if pair := next((found for found in pairs if found), None):
                yield objective, pair, shares

    def _fire(
        self,
        model: ModelStatus,
        objective: Objective,
        pair: Pair,
        shares: Mapping[int, Share],
        now: float,
        *,
        acts: bool,
    ) -> None:
        rows = self._rows(model.name, objective, now)
        recent = [(row.t, row.share) for row in rows if row.t >= now - pair.long_s]
        period = shares_of(objective, window_sums(self._state, model.name, now, (PERIOD_S,)))[PERIOD_S]
        more = self._roll_back(model, objective, rows, now) if acts else ""
        alert = objective_alert(
            objective,
            pair,
            shares,
            model=model.name,
            release=model.live_release.name if model.live_release else "",
            since=burning_since(objective, recent, pair.threshold) or now - pair.long_s,
            left=budget_left(objective, period, counted_for(self._state, model.name, now)),
            more=more,
        )
        self._alerts.fire(alert, now)

    def _roll_back(self, model: ModelStatus, objective: Objective, rows: list[Row], now: float) -> str:
        """Returns to the previous version if the live one is to blame; what was decided, as a sentence."""
        made = read_rollbacks(self._state, model.name)
        if (made and made[-1].outcome is None) or (made and made[-1].accepted and now - made[-1].t < FIRST_S):
            return f"automatic rollback to version {made[-1].to_label}: {made[-1].why}"
        problem = self._rollback.refusal(model, now)
        if problem is not None:
            return f"no automatic rollback: {problem}"
        live, previous = model.live_release, model.previous_release
        assert live is not None
        assert previous is not None
        verdict = blame(
            objective,
            rows,
            live=live.label,
            previous=previous.label,
            promoted=model.rollout.since if model.rollout.label == live.label else 0.0,
            now=now,
        )
        if not verdict.guilty:
            return f"no automatic rollback: {verdict.why}"
        self._rollback.begin(model, why=verdict.why, by=self.name, now=now)
        return f"automatic rollback to version {previous.label}: {verdict.why}"

    def _rows(self, model: str, objective: Objective, now: float) -> list[Row]:
        counts = [each for each in counts_since(self._state, model, now - _LOOK_BACK_S) if each.t <= now]
        versions = {name: _version(name) for name in {each.release for each in counts}}
        return [
            Row(
                t=each.t,
                version=versions[each.release],
                share=share_of(objective, each.sums),
            )
            for each in counts
        ]


def _version(release: str) -> str:
    try:
        return Release.parse(release).label
    except SerinError:
        return ""  # of no version


def _objectives(promise: Promise) -> tuple[Objective, ...]:
    promised = promise.objectives or ObjectivesSpec()
    found = [Objective(name="availability", target=promised.availability)]
    if promise.objectives:
        found.append(Objective(name="latency", target=promised.latency_share, limit_ms=promised.latency_ms))
    return tuple(found)
