"""The watcher's duty that uploads records to a store that several hosts share. A thread talks to the store: nothing
else of the watcher waits for it."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa

from serin.errors import SerinError
from serin.formats.shared_captures import combined_home
from serin.monitoring.alerts.alert import Alert, Alerts
from serin.monitoring.capture.counters import models_captured
from serin.store.store import Store
from serin.watcher.capture_duty import ClockTrust, capture_settings
from serin.watcher.served import has_agent
from serin.watcher.share_round import ShareRound, followed, shared_store

log = logging.getLogger(__name__)

ROUND_S: Final = 20.0
_ALARM_S: Final = 600.0
_ALL: Final = ""  # the key of an error that concerns all models
_STOP_S: Final = 2.0


class ShareDuty:
    """Implements `Duty`. Does nothing where records stay on this host."""

    name = "share"
    every_s = 5.0

    def __init__(
        self,
        home: Path,
        alerts: Alerts,
        *,
        make: Callable[[Store], ShareRound] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._alerts, self._clock = home, alerts, clock
        self._make = make or (
            lambda store: ShareRound(home, store, capture_settings(store), combines=followed(home, store))
        )
        self._store = shared_store(home)
        if not has_agent(home):  # any more
            shutil.rmtree(combined_home(home), ignore_errors=True)
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._failing: dict[str, tuple[float, Exception]] = {}  # since when, and why
        self._told: set[str] = set()
        self._trust = ClockTrust(clock)

    def tick(self, now: float) -> None:
        if self._store is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._store,), name="share", daemon=True)
            self._thread.start()
        with self._lock:
            failing = dict(self._failing)
        self._report(failing, now)

    def close(self) -> None:
        """What is not uploaded is uploaded by the next watcher."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self, store: Store) -> None:
        sharing: ShareRound | None = None
        while not self._stop.is_set():
            now, failed = time.time(), dict[str, Exception]()
            try:
                sharing = sharing or self._make(store)
                sharing.prepare()
                failed = sharing.run(now, trusted=self._trust.at(now))
            except (OSError, SerinError, pa.ArrowException, ValueError) as error:
                failed = {_ALL: error}
            self._note(failed, now)
            self._stop.wait(ROUND_S)

    def _note(self, failed: Mapping[str, Exception], now: float) -> None:
        with self._lock:
            before = self._failing
            self._failing = {
                model: (before[model][0] if model in before else now, error)
                for model, error in failed.items()
            }
        for model in failed.keys() - before.keys():
            log.warning("records%s cannot be uploaded: %s", f" of {model}" if model else "", failed[model])
        for model in before.keys() - failed.keys():
            log.info("records%s are uploaded again", f" of {model}" if model else "")

    def _report(self, failing: Mapping[str, tuple[float, Exception]], now: float) -> None:
        late = {
            model: found
            for name, found in failing.items()
            for model in ([name] if name else models_captured(self._home))
            if now - found[0] >= _ALARM_S
        }
        for model, (since, error) in late.items():
            self._alerts.fire(_alert(model, since, error, self._home), now)
        for model in self._told - late.keys():
            self._alerts.resolve(_key(model), now)
        self._told = set(late)


def _key(model: str) -> str:
    return f"{model}/capture/uploaded"


def _alert(model: str, since: float, error: Exception, home: Path) -> Alert:
    return Alert(
        key=_key(model),
        kind="capture",
        model=model,
        release="",
        severity="ticket",
        title=f"Recorded requests of {model} cannot be uploaded",
        text=f"{error}. They are kept in {home / 'captures'} up to monitoring.capture.max_size and keep, and uploaded "
        "when that is possible again; requests are answered as before.",
        since=since,
        facts={"error": f"{type(error).__name__}: {error}"},
    )
