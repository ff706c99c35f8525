"""The duty that watches the age of lookups: an alert when a table was not read again within `lookup.max_age`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from serin.errors import NotFound
from serin.monitoring.alerts.alert import Alert, Alerts
from serin.pipeline.lookups import LookupAge, lookup_ages
from serin.rollout.run.status import ModelStatus
from serin.spec.section import shortest
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.watcher.duty import Duty, look_at_each
from serin.watcher.served import watched_statuses

_seen: dict[Path, dict[Release, Sequence[LookupAge]]] = {}  # by home, of live releases


def last_lookups(home: Path) -> dict[Release, Sequence[LookupAge]]:
    """The lookups of live releases, as the duty of this process saw them last."""
    return dict(_seen.get(home, {}))


class LookupsDuty(Duty):
    """Looks at the live release of every model that is served here, or on the hosts that share a store."""

    name, every_s = "lookups", 30.0

    def __init__(self, home: Path, alerts: Alerts) -> None:
        self._home, self._alerts = home, alerts
        self._told: dict[str, set[str]] = {}  # keys of alerts that may be open, by model

    def tick(self, now: float) -> None:
        models = watched_statuses(self._home)
        live = {model.live_release for model in models}
        known = _seen.setdefault(self._home, {})
        for release in [release for release in known if release not in live]:
            del known[release]
        look_at_each(models, lambda model: self._look(model, now), lambda _: None)

    def _look(self, model: ModelStatus, now: float) -> None:
        release, ages = model.live_release, list[LookupAge]()
        if release is not None:
            try:
                ages = lookup_ages(Store.open(), release)
            except NotFound:
                return  # it was deleted, or is not there yet
            _seen[self._home][release] = ages
        old = {_key(model.name, each): each for each in ages if each.is_too_old(now)}
        for key, each in old.items():
            assert release is not None, "without one there are no ages"
            self._alerts.fire(age_alert(key, release, each, now), now)
        known = self._told.get(model.name, {_key(model.name, each) for each in ages})
        for key in known - old.keys():
            self._alerts.resolve(key, now, closed="" if ages else "no version with this lookup is live")
        self._told[model.name] = {_key(model.name, each) for each in ages}


def _key(model: str, age: LookupAge) -> str:
    return f"{model}/lookup/{age.table}"


def age_alert(key: str, release: Release, age: LookupAge, now: float) -> Alert:
    """The alert about a table that is older than it may be."""
    assert age.max_age_s is not None
    read = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(age.read))
    return Alert(
        key=key,
        kind="lookup",
        model=release.model,
        release=release.name,
        severity="ticket",
        title=f"The lookup in {age.table} is older than {shortest(age.max_age_s)}",
        text=(
            f"{release.name} answers with the table {age.table!r} as it was at {read}. `serin lookups refresh "
            f"{release.model}` reads it again; does its schedule run?"
        ),
        since=age.read + age.max_age_s,
        facts={"table": age.table, "age_s": now - age.read, "max_age_s": age.max_age_s, "rows": age.rows},
    )
