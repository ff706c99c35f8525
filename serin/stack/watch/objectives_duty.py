"""The duty that compares what clients got with what the live versions promise, and acts on a fast burn."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from serin.errors import SerinError
from serin.monitoring.alerts.alert import Alerts
from serin.monitoring.alerts.read import read_alerts
from serin.monitoring.alerts.records import AlertRecord
from serin.monitoring.history.read import counts_since, window_sums
from serin.monitoring.objectives.blame import BEFORE_S, FIRST_S, Row, blame
from serin.monitoring.objectives.burn import (
    PERIOD_S,
    QUIET_S,
    SEVERITIES,
    WINDOWS,
    Objective,
    Pair,
    Share,
    budget_left,
    burning_since,
    firing_pair,
)
from serin.monitoring.objectives.objective_alert import alert_key, objective_alert
from serin.monitoring.objectives.read import counted_for, share_of, shares_of
from serin.monitoring.objectives.state import ObjectivesState
from serin.monitoring.rollbacks import read_rollbacks
from serin.rollout.run.status import ModelStatus, status
from serin.stack.watch.auto_rollback import AutoRollback
from serin.stack.watch.promises import Promise, Promises
from serin.store.artifacts import Release

_LOOK_BACK_S: Final = max(WINDOWS) + BEFORE_S + FIRST_S


class ObjectivesDuty:
    """Looks at every model that is or was served here. Its only memory are the alert book and the files it writes."""

    name, every_s = "objectives", 10.0

    def __init__(self, home: Path, alerts: Alerts, promises: Promises) -> None:
        self._home, self._alerts, self._promises = home, alerts, promises
        self._rollback = AutoRollback(home)

    def tick(self, now: float) -> None:
        """A model that fails does not keep the others from being watched; its error is raised then."""
        failed: Exception | None = None
        found = read_alerts(self._home, resolved=0, now=now).open
        open_alerts = {each.alert.key: each for each in found if each.alert.kind == "objective"}
        models = status(self._home)
        for model in models:
            try:
                self._look(model, open_alerts, now)
            except (SerinError, OSError, ValueError, sqlite3.Error) as error:
                failed = error
        known = {model.name for model in models}
        for key in [key for key, each in open_alerts.items() if each.alert.model not in known]:
            self._alerts.resolve(key, now)
        if failed is not None:
            raise failed

    def close(self) -> None:
        pass

    def _look(self, model: ModelStatus, open_alerts: Mapping[str, AlertRecord], now: float) -> None:
        self._rollback.settle(model, now)
        promise = Promise() if model.live is None else self._promises.of(model.name, model.live)
        objectives = _objectives(promise)
        release = "" if model.live is None else Release(model=model.name, version=model.live).name
        state = ObjectivesState(model=model.name, release=release, objectives=objectives)
        if model.live is not None and state != ObjectivesState.load(self._home, model.name):
            state.save(self._home)
        sums = window_sums(self._home, model.name, now, WINDOWS)
        age_s = counted_for(self._home, model.name, now)
        fired = set()
        for objective in objectives:
            shares = shares_of(objective, sums)
            for severity in SEVERITIES:
                if pair := firing_pair(objective, shares, age_s, severity=severity):
                    fired.add(alert_key(model.name, objective.name, severity))
                    self._fire(model, objective, pair, shares, promise, now)
                    break  # the ticket waits until the page is over
        for key, record in open_alerts.items():
            quiet = not 0 <= now - record.seen < QUIET_S
            if record.alert.model == model.name and key not in fired and quiet:
                self._alerts.resolve(key, now)

    def _fire(
        self,
        model: ModelStatus,
        objective: Objective,
        pair: Pair,
        shares: Mapping[int, Share],
        promise: Promise,
        now: float,
    ) -> None:
        rows = self._rows(model.name, objective, now)
        recent = [(row.t, row.share) for row in rows if row.t >= now - pair.long_s]
        period = shares_of(objective, window_sums(self._home, model.name, now, (PERIOD_S,)))[PERIOD_S]
        more = ""
        if promise.objectives.rollback and pair.severity == "page":
            more = self._roll_back(model, objective, rows, now)
        alert = objective_alert(
            objective,
            pair,
            shares,
            model=model.name,
            release=Release(model=model.name, version=model.live).name if model.live else "",
            since=burning_since(objective, recent, pair.threshold) or now - pair.long_s,
            left=budget_left(objective, period),
            more=more,
        )
        self._alerts.fire(alert, now)

    def _roll_back(self, model: ModelStatus, objective: Objective, rows: list[Row], now: float) -> str:
        """Returns to the previous version if the live one is to blame; what was decided, as a sentence."""
        made = read_rollbacks(self._home, model.name)
        if (made and made[-1].outcome is None) or (made and made[-1].accepted and now - made[-1].t < FIRST_S):
            return f"the gateway returned to version {made[-1].to_version}: {made[-1].why}"
        problem = self._rollback.refusal(model, now)
        if problem is not None:
            return f"no automatic rollback: {problem}"
        assert model.live is not None
        assert model.previous is not None
        verdict = blame(
            objective,
            rows,
            live=model.live,
            previous=model.previous,
            promoted=model.rollout.since if model.rollout.version == model.live else 0.0,
            now=now,
        )
        if not verdict.guilty:
            return f"no automatic rollback: {verdict.why}"
        self._rollback.begin(model, why=verdict.why, by=self.name, now=now)
        return f"the gateway returned to version {model.previous}: {verdict.why}"

    def _rows(self, model: str, objective: Objective, now: float) -> list[Row]:
        rows = []
        for count in counts_since(self._home, model, now - _LOOK_BACK_S):
            try:
                version = Release.parse(count.release).version
            except SerinError:
                continue
            if count.t <= now:
                share = share_of(objective, (count.requests, count.errors, count.slow))
                rows.append(Row(t=count.t, version=version, share=share))
        return rows


def _objectives(promise: Promise) -> tuple[Objective, ...]:
    available = Objective(name="availability", target=promise.objectives.availability)
    if promise.p99_ms is None:
        return (available,)
    return (
        available,
        Objective(name="latency", target=promise.objectives.latency, limit_ms=promise.p99_ms),
    )
