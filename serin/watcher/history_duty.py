"""The duty that counts the gateway's requests into the history, by what the specs of served versions promise."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serin.errors import NotFound, SerinError
from serin.host.wiring import request_log
from serin.monitoring.history.store import History
from serin.spec.objectives import ObjectivesSpec
from serin.store.artifacts import Release
from serin.store.packages import stored_spec
from serin.store.store import Store
from serin.watcher.duty import Duty

log = logging.getLogger(__name__)

_RETRY_S: Final = 60.0
_BUSY_S: Final = 1.0  # of a tick, at most: other duties wait for it
_TIDY_S: Final = 60.0


class HistoryDuty(Duty):
    """A long log, as after a pause, is read over several ticks."""

    name, every_s = "history", 2.0

    def __init__(self, home: Path, promises: Promises) -> None:
        self._home, self._promises = home, promises
        self._history: History | None = None
        self._tidied = -_TIDY_S

    def tick(self, now: float) -> None:
        history = self._history = self._history or History(self._home)
        end = time.monotonic() + _BUSY_S
        more = True
        while more and time.monotonic() < end:
            _, more = history.read_log(request_log(self._home), self._promises.limit_ms)
        if time.monotonic() - self._tidied >= _TIDY_S:
            self._tidied = time.monotonic()
            history.tidy(now)

    def close(self) -> None:
        if self._history is not None:
            self._history.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """`objectives`: None for a server elsewhere whose spec has none; it is only watched for the default availability.
    `rollback`: return to the previous version when a budget burns too fast."""

    objectives: ObjectivesSpec | None = None
    rollback: bool = False


class Promises:
    """Reads each version's spec once: a version never changes."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._known: dict[tuple[str, int], Promise] = {}
        self._retry_at: dict[tuple[str, int], float] = {}

    def of(self, model: str, version: int) -> Promise:
        """Returns the default promise for a version that is not in the store, or cannot be read now."""
        key = model, version
        if key not in self._known and time.monotonic() >= self._retry_at.get(key, 0.0):
            try:
                self._known[key] = self._read(model, version)
            except NotFound:
                self._retry_at[key] = time.monotonic() + _RETRY_S
            except (SerinError, OSError) as error:
                self._retry_at[key] = time.monotonic() + _RETRY_S
                log.warning("the promises of %s version %d cannot be read: %s", model, version, error)
        return self._known.get(key, Promise())

    def limit_ms(self, model: str, release: str) -> float | None:
        """Returns the latency that a release of the request log promises."""
        try:
            parsed = Release.parse(release)
        except SerinError:
            return None
        promised = self.of(model, parsed.version).objectives
        return promised.latency_ms if promised else None

    def _read(self, model: str, version: int) -> Promise:
        self._store = self._store or Store.open()
        spec = stored_spec(Path(self._store.bundle(model, version).path))
        promised = (
            None if spec.served_elsewhere and "objectives" not in spec.model_fields_set else spec.objectives
        )
        return Promise(objectives=promised, rollback=spec.monitoring.rollback_on_burn)
