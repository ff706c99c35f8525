"""The duty that joins labels with recorded rows, measures live quality and holds it to the quality objective.

It does a bounded amount of work in a tick. Only the live version's alarms are reported; a version in a rollout is
judged by the controller, which reads the blocks that are written here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa

from serin.errors import SerinError
from serin.formats.quality import QualityReference, read_quality_reference
from serin.formats.serving.quality_evidence import QualityBlocks, write_quality_blocks
from serin.monitoring.alerts.alert import Alerts
from serin.monitoring.quality.follow import Follower, Hooks, QualityState, write_state
from serin.monitoring.quality.measure import (
    MOST_ROWS,
    ObjectiveState,
    Watch,
    alert_key,
    blocks_of,
    count_recorded,
    judge_blocks,
    measure_release,
    objective_of,
    quality_alert,
    scored,
    take_labels,
)
from serin.monitoring.quality.scan import Watched
from serin.monitoring.quality.store import quality_folder
from serin.monitoring.quality.view import QualityView, ReleaseQuality, write_quality
from serin.pipeline.labels import watched_versions
from serin.rollout.run.status import ModelStatus, status_of
from serin.spec.monitoring import MonitoringSpec, QualitySpec
from serin.store.artifacts import Release
from serin.store.home_objects import HomeObjects
from serin.store.objects import Objects
from serin.store.packages import stored_spec
from serin.store.store import Store
from serin.watcher.auto_rollback import AutoRollback
from serin.watcher.duty import Commit, Duty, look_at_each, nothing
from serin.watcher.served import followed_models, followed_records, watched_rollouts

_WORK_S: Final = 1.0  # of a tick: the recorder must not wait for long
_SHARE: Final = 0.05  # of the time that measuring may take
_DELETE_EVERY_S: Final = 3600.0


@dataclass(slots=True)
class _Model:
    """A model that is followed. `seen`: what the last view was made of. `due`: when the next one may be made."""

    name: str
    follower: Follower
    versions: QualityVersions
    seen: tuple[object, ...] | None = None
    due: float = 0.0
    deleted: float = 0.0
    blocks: dict[str, QualityBlocks] = field(default_factory=dict)


class QualityDuty(Duty):
    """Follows every model that has recorded rows or labels."""

    name, every_s = "quality", 5.0

    def __init__(
        self,
        home: Path,
        alerts: Alerts,
        clock: Callable[[], float] = time.monotonic,
        *,
        state: Path | None = None,
        objects: Objects | None = None,
        commit: Commit = nothing,
    ) -> None:
        """`state`: the home for labels and what it knows; None: `home`. `objects`: where the controller reads what is
        written for it; None: in `home`."""
        self._home, self._alerts, self._clock, self._state = home, alerts, clock, state or home
        self._models: dict[str, _Model] = {}
        self._objects = objects or HomeObjects(home)
        self._rollback = AutoRollback(home, self._state, commit)

    def tick(self, now: float) -> None:
        """Takes in what is new for a moment."""
        end = self._clock() + _WORK_S
        look_at_each(
            self._names(),
            lambda name: self._look(name, now, end),
            lambda name: self._models.pop(name, None),  # what it has in memory was not saved
        )

    def _names(self) -> list[str]:
        labelled = (path.name for path in (self._state / "labels").glob("*/"))
        return sorted({*followed_models(self._home), *labelled})

    def _look(self, name: str, now: float, end: float) -> None:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = self._open(name)
        model.versions.look_again()
        with followed_records(self._home, name) as sources:
            if sources is None:
                return
            more = model.follower.advance(sources)
            while more and self._clock() < end:
                more = model.follower.advance(sources)
        if now - model.deleted >= _DELETE_EVERY_S:
            model.deleted = now
            model.follower.delete_before(now - model.versions.kept_s())
        self._judge(model, now)
        state = model.follower.state
        evidence = tuple(each.get("count") for each in state.evidence.values())
        seen = dict(state.seen), state.labels, state.forgotten, more, evidence
        if seen != model.seen and self._clock() >= model.due:
            began = self._clock()
            write_quality(self._state, self._view(model, now, behind=more))
            model.seen, model.due = seen, self._clock() + (self._clock() - began) / _SHARE

    def _open(self, name: str) -> _Model:
        versions = QualityVersions(Store.open(), name)

        def labelled(watched: Watched, rows: pa.Table, state: QualityState) -> None:
            known = versions.known(watched.version)
            if known is not None and known.watch is not None:
                _take(state, watched.version, known.watch, rows, watched)

        hooks = Hooks(recorded=count_recorded, labelled=labelled)
        return _Model(name, Follower(self._state, name, versions.watched, hooks), versions)

    def _judge(self, model: _Model, now: float) -> None:
        """Judges blocks that are complete, tells the controller, and reports on the live version. Alerts are fired
        before the state is saved: a crash between the two only repeats them."""
        state, changed = model.follower.state, False
        blocks: dict[str, QualityBlocks] = {}
        for version in model.versions.served:
            known, name = model.versions.known(version), Release(model=model.name, version=version).name
            if known is None or known.watch is None:
                continue
            entry = state.evidence.get(str(version), {})
            if name in model.blocks and not entry.get("open"):
                blocks[name] = model.blocks[name]
                continue
            before = ObjectiveState.from_json(entry)
            after = judge_blocks(before, known.watch, now)
            if after is not before:
                state.evidence[str(version)] = after.to_json()
                changed = True
            blocks[name] = blocks_of(after, known.watch)
        self._report(model, now)
        if changed or blocks != model.blocks:
            write_state(quality_folder(self._state, model.name), state)
        if blocks != model.blocks:
            write_quality_blocks(self._objects, model.name, blocks)
            model.blocks = blocks

    def _report(self, model: _Model, now: float) -> None:
        live, state = model.versions.aliases.get("live"), model.follower.state
        known = None if live is None else model.versions.known(live)
        entry = state.evidence.get(str(live), {})
        if live is None or known is None or known.watch is None or not entry.get("alarm"):
            self._alerts.resolve(alert_key(model.name), now)
            return
        own = ObjectiveState.from_json(entry)
        release = Release(model=model.name, version=live, edition=model.versions.live_edition).name
        found, told = self._to_roll_back(model, known.watch.spec, now)
        objective = objective_of(own, known.watch)
        alert = quality_alert(model.name, release, objective, own.evidence.mean, rollback=told)
        self._alerts.fire(alert, now)
        if found is not None:
            self._rollback.begin(found, why=alert.text, by=self.name, now=now)

    def _to_roll_back(self, model: _Model, spec: QualitySpec, now: float) -> tuple[ModelStatus | None, str]:
        """Returns the model if its live version, which has an alarm, is to be rolled back now, and what is done in
        words."""
        found = status_of(watched_rollouts(self._home), model.name) if spec.rollback else None
        if found is None or found.live != model.versions.aliases.get("live"):
            return None, ""
        if reason := self._rollback.refusal(found, now):
            return None, f"it is not rolled back: {reason}"
        if model.follower.state.evidence.get(str(found.previous), {}).get("alarm"):
            return None, f"it is not rolled back: version {found.previous} was worse than allowed, too"
        label = found.previous_release.label if found.previous_release else found.previous
        return found, f"a rollback to version {label} is requested"

    def _view(self, model: _Model, now: float, *, behind: bool) -> QualityView:
        follower, state = model.follower, model.follower.state
        numbers = {int(version) for version in state.recorded} | set(follower.joined.versions())
        known = {version: found for version in sorted(numbers) if (found := model.versions.known(version))}
        return QualityView(
            model=model.name,
            updated=now,
            received=state.received,
            unknown=follower.waiting(),
            ambiguous=state.ambiguous,
            unclear=state.unclear,
            beyond=state.beyond,
            behind=behind,
            releases=tuple(self._release(model, version, found) for version, found in known.items()),
        )

    def _release(self, model: _Model, version: int, known: Known) -> ReleaseQuality:
        state = model.follower.state
        rows = model.follower.joined.read(version, most=MOST_ROWS)
        objective = None
        if known.watch is not None:
            own = ObjectiveState.from_json(state.evidence.get(str(version), {}))
            objective = objective_of(own, known.watch)
        return measure_release(model.name, known.watched, known.reference, rows, state, objective)


def _take(state: QualityState, version: int, watch: Watch, rows: pa.Table, watched: Watched) -> None:
    before = ObjectiveState.from_json(state.evidence.get(str(version), {}))
    after = take_labels(before, scored(rows, watched, watch.reference), watch)
    state.evidence[str(version)] = after.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One version. `reference`: None when it was exported without `quality.json`. `watch`: None without a quality
    objective."""

    watched: Watched
    reference: QualityReference | None
    monitoring: MonitoringSpec
    watch: Watch | None


class QualityVersions:
    """A version never changes, so each is read once; aliases are read at every look."""

    def __init__(self, store: Store, model: str) -> None:
        self._store, self._model = store, model
        self.watched = watched_versions(store, model)
        self._known: dict[int, Known] = {}
        self.aliases: dict[str, int] = {}
        self.live_edition = 1  # of the live version's lookups

    def known(self, version: int) -> Known | None:
        """None for a version that is not in the store, or without a spec."""
        if version not in self._known:
            found = self._find(version)
            if found is None:
                return None
            self._known[version] = found
        return self._known[version]

    def look_again(self) -> None:
        """Reads the aliases."""
        found = self._store.aliased(self._model)
        self.aliases = {alias: release.version for alias, release in found.items()}
        self.live_edition = found["live"].edition if "live" in found else 1

    @property
    def served(self) -> list[int]:
        """The versions that answer requests, or did before the last rollout."""
        return sorted(set(self.aliases.values()))

    def kept_s(self) -> float:
        """How long the live version keeps its records, else the newest."""
        versions = self._store.versions(self._model)
        version = self.aliases.get("live") or (versions[-1] if versions else None)
        known = None if version is None else self.known(version)
        return (known.monitoring if known else MonitoringSpec()).capture.keep

    def _find(self, version: int) -> Known | None:
        watched = self.watched(version)
        if watched is None:
            return None
        try:
            bundle = Path(self._store.bundle(self._model, version).path)
            reference = read_quality_reference(bundle)
            monitoring = stored_spec(bundle).monitoring
        except (SerinError, OSError):
            return None
        quality = monitoring.quality
        watch = None if reference is None or quality is None else Watch(reference=reference, spec=quality)
        return Known(watched=watched, reference=reference, monitoring=monitoring, watch=watch)
