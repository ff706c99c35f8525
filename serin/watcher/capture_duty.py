"""The watcher's duty that records requests: a thread takes them from the rings; small files are merged, old ones
deleted, and problems become alerts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

import numpy.typing as npt
import pyarrow as pa

from serin.errors import DecoderMissing, NotFound, SerinError
from serin.formats.captures import read_document
from serin.formats.schema import Schema, read_schema
from serin.formats.serving.recorded import RecordedBlock
from serin.monitoring.alerts.alert import Alert, Alerts
from serin.monitoring.capture.counters import Counters, models_captured
from serin.monitoring.capture.merge import merge_parts, tidy
from serin.monitoring.capture.recorder import Outcome, Plan, Plans, Recorder
from serin.monitoring.capture.retention import HomeHours, Hours, expire
from serin.serving.native.decoder import Decoder
from serin.serving.triton.installation import find_decoder
from serin.spec.monitoring import CaptureSpec
from serin.spec.stored import stored_capture
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.watcher.duty import Duty

log = logging.getLogger(__name__)

Settings = Callable[[Release], CaptureSpec | None]
"""What a release's spec says about its records; None when the version no longer exists."""

_CARE_S = 60.0  # between two looks at what can be merged or deleted ...
_ALL_S = 900.0  # ... among all hours
_RECENT_S = 3 * 3600.0
_JUMP_S = 3600.0
_DISTRUST_S = 86_400.0
_ROUND_S = 3.0  # of the recorder, unless ...
_FULL_ENOUGH = 0.25  # ... a ring is as full as this, ...
_LOOK_S = 0.1  # ... for which it looks so often
_STOP_S = 5.0
_QUIET_S = 600.0  # an alert about dropped requests ends after this long without another


class CaptureDuty(Duty):
    """What is in the rings when the watcher ends is recorded by the next one. `threaded`: a thread records, which does
    not wait for other duties; else each tick does."""

    name, every_s = "capture", 3.0

    def __init__(
        self,
        home: Path,
        alerts: Alerts,
        *,
        settings: Settings | None = None,
        recorder: Recorder | None = None,
        threaded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._alerts, self._clock = home, alerts, clock
        self._settings = settings or capture_settings(Store.open())
        self._recorder = recorder or new_recorder(home, Store.open())
        self._thread = RecorderThread(self._recorder) if threaded else None
        self._cared: float | None = None
        self._all_cared, self._all_due = float("-inf"), False
        self._trust = ClockTrust(clock)
        self._care_failed: dict[str, Exception] = {}
        self._failing = FailingModels(
            alerts,
            "written",
            "Requests of {} cannot be recorded",
            "They wait in memory and are dropped once the ring is nearly full; requests are answered as before. "
            f"Free space in {home / 'captures'} or make it writable.",
        )
        self._dropped: dict[str, tuple[int, float]] = {}

    def tick(self, now: float) -> None:
        if self._cared is None:
            self._each_model(lambda model: tidy(self._home, model))
        outcome = self._thread.outcome() if self._thread else self._recorder.record(now)
        trusted = self._trust.at(now)
        cared = self._cared is None or self._clock() - self._cared >= _CARE_S
        if cared:
            self._cared = self._clock()
            self._all_due = self._cared - self._all_cared >= _ALL_S
            if self._all_due:
                self._all_cared = self._cared
            self._each_model(lambda model: self._care(model, now, trusted=trusted))
        # Last, because the alerts' disk may be full as well.
        self._failing.report({**self._care_failed, **outcome.failed}, now)
        for model in models_captured(self._home) if cared else ():
            self._report_dropped(model, now)

    def close(self) -> None:
        if self._thread:
            self._thread.close()

    def _each_model(self, action: Callable[[str], object]) -> None:
        self._care_failed = {}
        for model in models_captured(self._home):
            try:
                action(model)
            except (OSError, SerinError, pa.ArrowException) as error:
                self._care_failed[model] = error

    def _care(self, model: str, now: float, *, trusted: bool) -> None:
        if self._all_due:  # first: it may free the disk
            expire_by(self._settings, HomeHours(self._home, model), now if trusted else None)
        merge_parts(self._home, model, now, since=None if self._all_due else now - _RECENT_S)

    def _report_dropped(self, model: str, now: float) -> None:
        dropped = Counters.of(read_document(self._home, model)).dropped
        before, since = self._dropped.get(model, (dropped, now - _QUIET_S))
        key = f"{model}/capture/dropped"
        if dropped > before:
            self._dropped[model] = dropped, now
            self._alerts.fire(
                Alert(
                    key=key,
                    kind="capture",
                    model=model,
                    severity="info",
                    title=f"Requests of {model} were not recorded",
                    text=f"{dropped - before} requests that were drawn were dropped: recording cannot keep up, "
                    "they are too large for the ring in memory, or they cannot be decoded: the watcher's log "
                    "says why. Lower monitoring.capture.share, or give the gateway more shared memory.",
                    since=now,
                    facts={"dropped": dropped},
                ),
                now,
            )
        else:
            self._dropped[model] = dropped, since
            if now - since > _QUIET_S:
                self._alerts.resolve(key, now)


class FailingModels:
    """Alerts about models whose records could not be kept for `after_s`. `title`: with a place for the model. `text`:
    what follows from it."""

    def __init__(self, alerts: Alerts, name: str, title: str, text: str, after_s: float = 0.0) -> None:
        self._alerts, self._name, self._title, self._text, self._after_s = alerts, name, title, text, after_s
        self._since: dict[str, float] = {}

    def report(self, failed: Mapping[str, Exception], now: float) -> None:
        """`failed`: the models that fail now, and why."""
        for model in self._since.keys() - failed.keys():
            del self._since[model]
            log.info("the records of %s are %s again", model, self._name)
            self._alerts.resolve(f"{model}/capture/{self._name}", now)
        for model, error in failed.items():
            title = self._title.format(model)
            if model not in self._since:
                log.warning("%s: %s", title, error)
            since = self._since.setdefault(model, now)
            if now - since >= self._after_s:
                self._alerts.fire(
                    Alert(
                        key=f"{model}/capture/{self._name}",
                        kind="capture",
                        model=model,
                        severity="ticket",
                        title=title,
                        text=f"{error}. {self._text}",
                        since=since,
                        facts={"error": f"{type(error).__name__}: {error}"},
                    ),
                    now,
                )


class RecorderThread:
    """Records every three seconds, or when a ring is a quarter full. Starts when its outcome is first asked for, and
    again after an error."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._rounds: Future[None] | None = None
        self._failed: dict[str, Exception] = {}

    def outcome(self) -> Outcome:
        """What could not be written last. Raises the error that ended the last round."""
        before = self._rounds
        if before is None or before.done():
            self._rounds = self._pool.submit(self._run)
            if before is not None:
                before.result()
        return Outcome(failed=self._failed)

    def close(self) -> None:
        """Records once more what is there."""
        self._stop.set()
        if self._rounds is not None:
            wait([self._rounds], _STOP_S)
        self._pool.shutdown(wait=False)

    def _run(self) -> None:
        last = False
        while not last:
            last = self._stop.is_set()
            self._failed = self._recorder.record(time.time()).failed
            if not last:
                self._wait(hurries=not self._failed)

    def _wait(self, *, hurries: bool) -> None:
        """Waits for the next round. `hurries`: not so long when a ring fills up."""
        end = time.monotonic() + _ROUND_S
        while time.monotonic() < end and not self._stop.wait(_LOOK_S):
            if hurries and self._recorder.fill() > _FULL_ENOUGH:
                return


class ClockTrust:
    """Notices when the clock jumps forwards. For a day afterwards no record counts as too old: a clock that is wrong by
    a month must not delete a month of records."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offset: float | None = None
        self._jumped: float | None = None

    def at(self, now: float) -> bool:
        offset = now - self._clock()
        if self._offset is not None and offset - self._offset > _JUMP_S:
            self._jumped = self._clock()
            log.warning(
                "the clock jumped forwards by %.1f hours; records are not deleted by age for a day",
                (offset - self._offset) / 3600,
            )
        self._offset = offset
        return self._jumped is None or self._clock() - self._jumped > _DISTRUST_S


def new_recorder(home: Path, store: Store) -> Recorder:
    return Recorder(home, capture_plans(store), decode)


def decode(schema: Schema, hidden: Collection[str], entries: npt.ArrayLike) -> RecordedBlock:
    """Calls the compiled decoder. Raises DecoderMissing where it was not built."""
    return _decoder()(schema, hidden, entries)


@cache
def _decoder() -> Decoder:
    library = find_decoder()
    if library is None:
        raise DecoderMissing
    return Decoder(library)


def capture_plans(store: Store) -> Plans:
    """Reads what is recorded of a release, and the names and types of its columns, from its bundle."""
    known: dict[str, Plan] = {}

    def plans(release: Release) -> Plan | None:
        if release.name not in known:
            try:
                bundle = Path(store.bundle(release.model, release.label).path)
            except NotFound:
                return None
            known[release.name] = Plan(schema=read_schema(bundle), settings=stored_capture(bundle))
        return known[release.name]

    return plans


def capture_settings(store: Store) -> Settings:
    """Reads `monitoring.capture` of a release from the spec that is stored with its version."""
    plans = capture_plans(store)

    def settings(release: Release) -> CaptureSpec | None:
        plan = plans(release)
        return None if plan is None else plan.settings

    return settings


def expire_by(settings: Settings, hours: Hours, now: float | None, *, remove: bool = True) -> int:
    """Deletes old records by the settings of the newest version that is in the store, else by the default."""
    versions = sorted({version for _, version, _ in hours.sizes()}, reverse=True)
    newest_first = (settings(Release(model=hours.model, version=version)) for version in versions)
    limits = next((found for found in newest_first if found is not None), CaptureSpec())
    return expire(hours, limits, now, remove=remove)
