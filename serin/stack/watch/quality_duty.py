"""The duty that joins labels with recorded rows and measures live quality, a bounded amount of work at a time."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from serin.errors import BundleBroken, NotFound, SerinError
from serin.formats.quality import QualityReference, read_quality_reference
from serin.monitoring.quality.follow import Follower, Hooks
from serin.monitoring.quality.measure import MOST_ROWS, count_recorded, measure_release
from serin.monitoring.quality.scan import Watched
from serin.monitoring.quality.state import QualityState
from serin.monitoring.quality.view import QualityView, ReleaseQuality, write_quality
from serin.pipeline.labels import watched_versions
from serin.spec.load import load_stored_spec
from serin.spec.monitoring import MonitoringSpec
from serin.store.store import Store

log = logging.getLogger(__name__)

_WORK_S: Final = 1.0  # of a tick: the recorder must not wait for long
_SHARE: Final = 0.05  # of the time that measuring may take
_DELETE_EVERY_S: Final = 3600.0


@dataclass(slots=True)
class _Model:
    """A model that is followed. `seen`: what the last view was made of. `due`: when the next one may be made."""

    follower: Follower
    reference: Callable[[int], QualityReference | None]
    seen: tuple[str | None, str] | None = None
    due: float = 0.0
    deleted: float = 0.0


class QualityDuty:
    """Follows every model that has recorded rows or labels."""

    name, every_s = "quality", 5.0

    def __init__(self, home: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._home, self._clock = home, clock
        self._models: dict[str, _Model] = {}

    def tick(self, now: float) -> None:
        """Takes in what is new for a moment. A model that fails does not keep the others from being followed; its error
        is raised then."""
        failed: Exception | None = None
        end = self._clock() + _WORK_S
        for name in self._names():
            try:
                self._look(name, now, end)
            except (SerinError, OSError, ValueError, pa.ArrowException) as error:
                self._models.pop(name, None)  # what it has in memory was not saved
                failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        pass

    def _names(self) -> list[str]:
        folders = (self._home / "captures", self._home / "labels")
        return sorted(
            {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()}
        )

    def _look(self, name: str, now: float, end: float) -> None:
        model = self._models.get(name) or self._models.setdefault(name, self._open(name))
        more = model.follower.advance()
        while more and self._clock() < end:
            more = model.follower.advance()
        if now - model.deleted >= _DELETE_EVERY_S:
            model.deleted = now
            model.follower.delete_before(now - self._monitoring(name).capture.days * 86_400)
        state = model.follower.state
        seen = state.part, state.labels
        if seen != model.seen and self._clock() >= model.due:
            began = self._clock()
            write_quality(self._home, self._view(name, model, now, behind=more))
            model.seen, model.due = seen, self._clock() + (self._clock() - began) / _SHARE

    def _open(self, name: str) -> _Model:
        store = Store.open()
        versions = watched_versions(store, name)
        hooks = Hooks(recorded=count_recorded, labelled=_nothing)

        @functools.cache
        def reference(version: int) -> QualityReference | None:
            try:
                return read_quality_reference(Path(store.bundle(name, version).path))
            except (NotFound, BundleBroken):
                return None

        return _Model(Follower(self._home, name, versions, hooks), reference)

    def _view(self, name: str, model: _Model, now: float, *, behind: bool) -> QualityView:
        follower, versions = model.follower, watched_versions(Store.open(), name)
        state = follower.state
        numbers = {int(version) for version in state.recorded} | set(follower.joined.versions())
        releases: list[ReleaseQuality] = []
        for version in sorted(numbers):
            watched = versions(version)
            if watched is not None:
                rows = follower.joined.read(version, most=MOST_ROWS)
                releases.append(measure_release(name, watched, model.reference(version), rows, state, None))
        return QualityView(
            model=name,
            updated=now,
            received=state.received,
            unknown=follower.waiting(),
            ambiguous=state.ambiguous,
            unclear=state.unclear,
            behind=behind,
            releases=tuple(releases),
        )

    def _monitoring(self, name: str) -> MonitoringSpec:
        """What the spec of the live version says, else of the newest."""
        store = Store.open()
        try:
            version = store.aliases(name).get("live") or store.versions(name)[-1]
            return load_stored_spec(Path(store.bundle(name, version).path) / "spec.yaml").monitoring
        except (SerinError, OSError, IndexError):
            return MonitoringSpec()


def _nothing(watched: Watched, rows: pa.Table, state: QualityState) -> None:
    del watched, rows, state
