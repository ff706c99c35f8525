"""The watcher's duty that shares records with other hosts through a store: applies requests to delete rows, uploads
what is new, copies those of all hosts where they are followed, and deletes what is old in the store. A thread talks to
the store: nothing else of the watcher waits for it."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

from serin.errors import SerinError, StoreUnreachable
from serin.expressions import ExpressionError, parse
from serin.formats.captures import captures_folder, versions_captured
from serin.formats.cluster.leader import Leader
from serin.formats.forget_requests import (
    APPLIED,
    Applied,
    ForgetRequest,
    applied_by,
    read_applied,
    read_requests,
    requested_models,
    write_applied,
)
from serin.formats.serving.ring import are_recorded, ring_heads
from serin.formats.shared_captures import GONE, RECORDS, begin_sharing, checked_host, combined_home
from serin.machine import environment
from serin.monitoring.alerts.alert import Alert, Alerts
from serin.monitoring.capture.all_hosts import combine
from serin.monitoring.capture.counters import models_captured
from serin.monitoring.capture.forget import Deletion, column_types, forget, forget_shared
from serin.monitoring.capture.merge import merge_parts, tidy
from serin.monitoring.capture.retention import expire, expire_shared
from serin.monitoring.capture.shared_read import SharedRecords
from serin.monitoring.capture.shared_upload import Uploader, uploadable
from serin.pipeline import labels
from serin.spec.yaml_file import read_mapping
from serin.store.store import Store
from serin.watcher.capture_duty import ClockTrust, Settings, capture_limits, capture_settings
from serin.watcher.cluster_state import LEADER
from serin.watcher.duty import Duty
from serin.watcher.served import has_agent, led_by, served_models, state_home

log = logging.getLogger(__name__)

ROUND_S: Final = 20.0
_ALARM_S: Final = 600.0
_ALL: Final = ""  # the key of an error that concerns all models
_STOP_S: Final = 2.0
_RECENT_S: Final = 3 * 3600.0
_BUFFERED_S: Final = 2.5  # an answer is in its ring a moment after the client has it


class ShareDuty(Duty):
    """Does nothing where records stay on this host."""

    name, every_s = "share", 5.0

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
        severity="ticket",
        title=f"Recorded requests of {model} cannot be uploaded",
        text=f"{error}. They are kept in {home / 'captures'} up to monitoring.capture.max_size and keep, and uploaded "
        "when that is possible again; requests are answered as before.",
        since=since,
        facts={"error": f"{type(error).__name__}: {error}"},
    )


def followed(home: Path, store: Store) -> Callable[[str], bool]:
    """Says of which models the records of all hosts are needed here: those with labels, and those whose newest served
    version has a drift or a quality section. Only where an agent serves."""
    known: dict[tuple[str, int], bool] = {}

    def needed(model: str) -> bool:
        if any((each / "labels" / model).is_dir() for each in (home, state_home(home)) if each):
            return True
        versions = [served.live for served in served_models(home) if served.name == model]
        version = versions[0] if versions else store.aliases(model).get("live")
        if version is None:
            return False
        if (model, version) not in known:
            spec = Path(store.bundle(model, version).path) / "spec.yaml"
            monitoring = (read_mapping(spec).get("monitoring") or {}) if spec.exists() else {}
            known[model, version] = bool(monitoring.get("drift") or monitoring.get("quality"))
        return known[model, version]

    return needed if has_agent(home) else lambda _: False


def shared_store(home: Path) -> Store | None:
    """The store to which this home uploads its records: a bucket, or any that an agent shares. None: they stay here."""
    url = environment.shared_store_url()
    if url is None:
        return None
    store = Store(url)
    return store if not store.local or has_agent(home) else None


class ShareRound:
    """`settings`: of a release. `combines`: of which models the records of all hosts are copied to this one. `care_s`:
    between two looks at what is old in the store."""

    def __init__(
        self,
        home: Path,
        store: Store,
        settings: Settings,
        *,
        host: str | None = None,
        combines: Callable[[str], bool] = lambda _: False,
        care_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._settings, self._clock, self._care_s = home, settings, clock, care_s
        self._combines = combines
        self._host = checked_host(host or environment.host())
        self.records = SharedRecords.of(store, home)
        self._uploader = Uploader(home, store.shared_files(), self._host)
        self._seen: dict[tuple[str, int], tuple[float, dict[str, int]]] = {}
        """When a request was first read here, and how far the rings were written then."""
        self._found: dict[tuple[str, int], Deletion] = {}
        # The keys of what all hosts had done when outdated copies were last dropped.
        self._applied: set[str] = set()
        self._cared = float("-inf")

    def prepare(self) -> None:
        """Notes that all models here are to be uploaded. Needs no store."""
        for model in models_captured(self._home):
            begin_sharing(self._home, model)

    def run(self, now: float, *, trusted: bool = True) -> dict[str, Exception]:
        """Returns the errors by model. One that fails does not keep the others waiting, unless the store is away: then
        StoreUnreachable is raised. `trusted`: whether the clock may decide what is old."""
        files = self.records.files
        asked, applied = requested_models(files), set(files.keys(APPLIED))
        done = applied_by(applied, self._host)
        cares = self._clock() - self._cared >= self._care_s
        if cares:
            files.remove(f"{GONE}{self._host}.json")
        failed: dict[str, Exception] = {}
        for model in sorted({*models_captured(self._home), *asked, *self.records.models()}):
            try:
                self._share(model, asked.get(model, set()) - done.get(model, set()), now)
                if asked.get(model):
                    self._apply_for_gone(model, applied, now)
                if applied != self._applied:  # a host has replaced files since
                    self.records.drop_outdated(model, self.records.listing(model))
                if self._combines(model):
                    self._combine(model, now)
                if cares:
                    self._care(model, now if trusted else None)
            except StoreUnreachable:
                raise
            except (OSError, SerinError, pa.ArrowException, ValueError) as error:
                failed[model] = error
        if cares:
            self._cared = self._clock()
        if not failed:
            self._applied = applied
        return failed

    def _share(self, model: str, pending: set[int], now: float) -> None:
        limit = uploadable(self._home, model)  # before rows are deleted: later ones wait for the next round
        if pending:
            requests = [each for each in read_requests(self.records.files, model) if each.seq in pending]
            for request in requests:
                self._apply(request, now)
        if model in models_captured(self._home):
            self._uploader.upload(model, now, limit=limit)

    def _apply(self, request: ForgetRequest, now: float) -> None:
        """Deletes the rows here and in what this host wrote. The request is applied once all rows that were answered
        before it was read are recorded; until then it is repeated."""
        if self._waits_for_leader(request):
            return
        key = request.model, request.seq
        if key not in self._seen:
            self._seen[key] = now, ring_heads(self._home)
        seen, heads = self._seen[key]
        settled = now - seen > _BUFFERED_S and are_recorded(self._home, heads)
        before, problem = self._found.get(key, Deletion(rows=0, files=0)), ""
        try:
            found = _sum(before, self._forget(request))
            self._found[key] = found
            settled &= self._drop_copies(request)
        except ExpressionError as error:
            found, problem = before, str(error)
        if not settled and not problem:
            return
        applied = Applied(
            host=self._host, by=self._host, t=now, rows=found.rows, files=found.files, labels=found.labels,
            problem=problem,
        )  # fmt: skip
        labels.count_again(request.model, self._state())
        if led := led_by(self._home):
            led.keep()  # the next leader must not have these labels
        write_applied(self.records.files, request, applied)
        log.info("%d rows of %s were deleted on request %d", found.rows, request.model, request.seq)
        self._seen.pop(key, None)
        self._found.pop(key, None)

    def _forget(self, request: ForgetRequest) -> Deletion:
        model, where = request.model, request.where
        uploaded = forget_shared(self.records, model, where, [self._host])
        here = self._forget_in(self._home, model, where)
        copies = self._forget_in(combined_home(self._home), model, where)
        if here.rows or copies.rows:
            labels.count_again(model, self._state())
        # What was uploaded is here as well, unless it was deleted here to make room.
        return Deletion(
            rows=max(here.rows, uploaded.rows),
            files=max(here.files, uploaded.files),
            labels=here.labels + copies.labels,
        )

    def _drop_copies(self, request: ForgetRequest) -> bool:
        """Deletes copies of files that a host has replaced, or is still to replace. False: one is being read."""
        done = {self._host, *read_applied(self.records.files, request.model).get(request.seq, {})}
        listing = self.records.listing(request.model)
        return self.records.drop_outdated(
            request.model, [file for file in listing if file.writer.host in done]
        )

    def _forget_in(self, home: Path, model: str, where: str) -> Deletion:
        if not captures_folder(home, model).is_dir():
            return Deletion(rows=0, files=0)
        if not set(parse(where).columns) <= column_types(home, model).keys():
            return Deletion(rows=0, files=0, leftovers=tidy(home, model))
        return forget(
            home, model, where, also=[lambda *rows: labels.forget(model, dict([rows]), self._state())]
        )

    def _state(self) -> Path:
        """The home with the labels: those of all hosts, if this watcher leads."""
        return state_home(self._home) or self._home

    def _waits_for_leader(self, request: ForgetRequest) -> bool:
        """Whether the leading watcher has still to delete the labels of the rows, which it finds by its copies. If it
        is lost, the next one does with copies in which nothing was deleted yet."""
        stored = None if state_home(self._home) else self.records.files.read(LEADER)
        if stored is None:
            return False
        host = Leader.load(stored.content).holder.partition("/")[0]
        done = applied_by(self.records.files.keys(APPLIED), host).get(request.model, set())
        return host not in ("", self._host) and request.seq not in done

    def _apply_for_gone(self, model: str, applied: set[str], now: float) -> None:
        files = self.records.files
        gone = {key.removeprefix(GONE).removesuffix(".json") for key in files.keys(GONE)} - {self._host}
        for host in sorted(gone):
            done = applied_by(applied, host).get(model, set())
            for request in read_requests(files, model):
                if request.seq not in done:
                    found = forget_shared(self.records, model, request.where, [host])
                    report = Applied(host=host, by=self._host, t=now, rows=found.rows, files=found.files)
                    write_applied(files, request, report)

    def _combine(self, model: str, now: float) -> None:
        """Copies new rows of all hosts; those that their host has not deleted yet, though it was asked to, are left
        out."""
        requests, applied = read_requests(self.records.files, model), read_applied(self.records.files, model)
        hosts = self.records.files.names(f"{RECORDS}{model}/") if requests else []
        hidden = {
            host: [each.where for each in requests if host not in applied.get(each.seq, {})] for host in hosts
        }
        with suppress(FileNotFoundError):  # a file was replaced just now: the next round finds its rows
            combine(self._home, self.records, model, hidden)
        if any(hidden.values()):  # files of these hosts still have rows that are to be deleted
            listing = self.records.listing(model)
            self.records.drop_outdated(model, [file for file in listing if not hidden.get(file.writer.host)])
        merge_parts(combined_home(self._home), model, now, since=now - _RECENT_S)

    def _care(self, model: str, now: float | None) -> None:
        uploaded = {file.version for file in self.records.listing(model)}
        versions = {*versions_captured(self._home, model), *uploaded}
        limits, combined = capture_limits(self._settings, model, versions), combined_home(self._home)
        expire_shared(self.records, model, limits, now)
        self.records.drop_outdated(model, self.records.listing(model))
        if captures_folder(combined, model).is_dir():
            expire(combined, model, limits, now)
            tidy(combined, model)
            merge_parts(combined, model, time.time())


def _sum(one: Deletion, other: Deletion) -> Deletion:
    return Deletion(
        rows=one.rows + other.rows, files=one.files + other.files, labels=one.labels + other.labels
    )
