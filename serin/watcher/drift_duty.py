"""The duty that watches live traffic for drift: counts recorded rows, and reports columns that have left their range.
Where an agent serves, it counts the rows of all hosts.

Only the live version's alarms are reported. A version that is being rolled out is counted beside it, so that nothing
starts from zero when it is promoted.
"""

from __future__ import annotations

from pathlib import Path

from serin.errors import NotFound
from serin.formats.drift import read_drift
from serin.formats.importance import read_importance
from serin.formats.schema import read_schema
from serin.monitoring.alerts.alert import Alert, Alerts
from serin.monitoring.drift.model_watch import ModelWatch, Watched, state_file
from serin.monitoring.drift.read import alert_key, drift_alert
from serin.store.artifacts import Release
from serin.store.packages import stored_spec
from serin.store.store import Store
from serin.watcher.duty import Duty, look_at_each
from serin.watcher.served import Served, followed_records, served_models


class DriftDuty(Duty):
    """Watches every model that is served here and whose spec has `monitoring.drift`."""

    name, every_s = "drift", 5.0

    def __init__(self, home: Path, alerts: Alerts, state: Path | None = None) -> None:
        """`state`: the home for what it knows; None: `home`."""
        self._home, self._alerts, self._state = home, alerts, state or home
        self._watches: dict[str, ModelWatch] = {}
        self._versions: dict[tuple[str, int], Watched | None] = {}

    def tick(self, now: float) -> None:
        look_at_each(
            served_models(self._home),
            lambda model: self._look(model, now),
            lambda model: self._watches.pop(model.name, None),  # what it has in memory was not saved
        )

    def _look(self, model: Served, now: float) -> None:
        wanted = {
            version: found for version in model.versions if (found := self._version(model.name, version))
        }
        watch = self._watches.get(model.name)
        if watch is None:
            if not wanted and not state_file(self._state, model.name).is_file():
                return
            watch = ModelWatch.load(self._state, model.name, wanted)
            self._watches[model.name] = watch
        if not wanted and not watch.releases and not watch.told:
            return
        with followed_records(self._home, model.name) as sources:
            if sources is None and wanted:
                return
            changed = watch.watch(wanted, model.live, model.live_edition)
            counted = watch.follow(sources or {})
        told = watch.told
        self._report(watch, now)
        if changed or counted or told != watch.told:
            watch.save()

    def _report(self, watch: ModelWatch, now: float) -> None:
        """Fires the alerts of the live version and resolves all others, before the state is saved: a crash between the
        two only repeats it."""
        alerts = [] if watch.live is None else list(self._open(watch, watch.live))
        for alert in alerts:
            self._alerts.fire(alert, now)
        keys = {alert.key for alert in alerts}
        for key in set(watch.told) - keys:
            self._alerts.resolve(key, now, closed=_unresolved(watch, key))
        watch.told = tuple(sorted(keys))

    def _open(self, watch: ModelWatch, version: int) -> list[Alert]:
        release = watch.releases.get(version)
        if release is None:
            return []
        name = Release(model=watch.model, version=version, edition=watch.live_edition).name
        alarms = release.state.alarms.values()
        importance = read_importance(Path(release.state.bundle)) if alarms else None
        return [drift_alert(watch.model, name, alarm, release.statistics, importance) for alarm in alarms]

    def _version(self, model: str, version: int) -> Watched | None:
        """A served version with its statistics; looked up once. None: its drift is not watched."""
        key = model, version
        if key not in self._versions:
            try:
                bundle = Path(Store.open().bundle(model, version).path)
            except NotFound:
                return None  # deleted, or not there yet
            self._versions[key] = _watched(bundle, version)
        return self._versions[key]


def _unresolved(watch: ModelWatch, key: str) -> str:
    """Why an alert ends although its column is not known to be back; empty: it is back."""
    if watch.live is None:
        return "no version is live"
    release = watch.releases.get(watch.live)
    if release is None:
        return f"version {watch.live} is not watched"
    if key in {alert_key(watch.model, each.alarm.column) for each in release.state.past}:
        return ""
    return f"version {watch.live} is compared with its own training rows"


def _watched(bundle: Path, version: int) -> Watched | None:
    if not (bundle / "spec.yaml").is_file():
        return None  # a team's own repository
    spec = stored_spec(bundle).monitoring
    statistics = None if spec.drift is None else read_drift(bundle)
    if statistics is None:
        return None
    inputs = tuple(column.name for column in read_schema(bundle).inputs)
    return Watched(version=version, bundle=bundle, statistics=statistics, inputs=inputs)
