"""The watcher's duty that shares records with other hosts through a store: applies requests to delete rows, uploads
what is new, and deletes what is old in the store. The leading watcher also copies the records of all hosts, which its
other duties follow. A thread talks to the store: nothing else of the watcher waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

from serin.errors import SerinError, StoreUnreachable
from serin.expressions import ExpressionError, parse
from serin.formats.captures import captures_folder, in_force, versions_captured
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
from serin.formats.shared_captures import GONE, RECORDS, SharedFile, begin_sharing, checked_host
from serin.machine import environment
from serin.monitoring.alerts.alert import Alert, Alerts
from serin.monitoring.capture.all_hosts import FOLLOWED, Folder, SharedRecords, folders
from serin.monitoring.capture.counters import models_captured
from serin.monitoring.capture.forget import Deletion, Forgotten, forget
from serin.monitoring.capture.merge import tidy
from serin.monitoring.capture.read import Source, column_types
from serin.monitoring.capture.retention import HomeHours, Hours, StoreHours, expire
from serin.monitoring.capture.shared_upload import Uploader, uploadable
from serin.pipeline import labels
from serin.spec.yaml_file import read_mapping
from serin.store.store import Store
from serin.watcher.capture_duty import ClockTrust, Settings, capture_limits, capture_settings
from serin.watcher.cluster_state import LEADER
from serin.watcher.duty import Duty
from serin.watcher.served import Led, has_agent, led_by, served_models, state_home

log = logging.getLogger(__name__)

ROUND_S: Final = 20.0
_ALARM_S: Final = 600.0
_ALL: Final = ""  # the key of an error that concerns all models
_STOP_S: Final = 2.0
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
            lambda store: ShareRound(home, store, capture_settings(store), follows=followed(home, store))
        )
        self._store = shared_store(home)
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
    """Says of which models the leading watcher follows the records: those with labels, and those whose newest served
    version has a drift or a quality section."""
    known: dict[tuple[str, int], bool] = {}

    def needed(model: str) -> bool:
        state = state_home(home)
        if state is not None and (state / "labels" / model).is_dir():
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

    return needed


def shared_store(home: Path) -> Store | None:
    """The store to which this home uploads its records: a bucket, or any that an agent shares. None: they stay here."""
    url = environment.shared_store_url()
    if url is None:
        return None
    store = Store(url)
    return store if not store.local or has_agent(home) else None


class ShareRound:
    """`settings`: of a release. `follows`: of which models the records of all hosts are copied to this one if its
    watcher leads. `care_s`: between two looks at what is old in the store."""

    def __init__(
        self,
        home: Path,
        store: Store,
        settings: Settings,
        *,
        host: str | None = None,
        follows: Callable[[str], bool] = lambda _: True,
        care_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._settings, self._clock, self._care_s = home, settings, clock, care_s
        self._host = checked_host(host or environment.host())
        self.records = SharedRecords.of(store, home)
        self._uploader = Uploader(home, self.records, self._host)
        self._copies = FollowedCopies(home, SharedRecords.of(store, home, FOLLOWED), follows)
        self._seen: dict[tuple[str, int], tuple[float, dict[str, int]]] = {}
        """When a request was first read here, and how far the rings were written then."""
        self._found: dict[tuple[str, int], defaultdict[str, Deletion]] = {}
        """What was deleted so far on a request, by host."""
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
                if cares:
                    self._expire(model, now if trusted else None)
                outdated = cares or applied != self._applied  # a host has replaced files since
                if outdated:
                    self.records.drop_outdated(model, self.records.listing(model))
                with suppress(FileNotFoundError):  # a file was replaced just now: the next round copies it
                    self._copies.update(model, asked.get(model, set()), applied, compare=outdated)
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
        found, problem = self._found.setdefault(key, defaultdict(Deletion)), ""
        applied = read_applied(self.records.files, request.model).get(request.seq, {})
        try:
            for host, deletion in self._forget(request).items():
                found[host] += deletion
            settled &= self._drop_copies(request.model, {self._host, *applied})
        except ExpressionError as error:
            problem = str(error)
        if not settled and not problem:
            return
        labels.count_again(request.model, self._state())
        if led := led_by(self._home):
            led.keep()  # the next leader must not have these labels
        own = found.pop(self._host, Deletion())
        rows = max([own.rows, *(each.others.get(self._host, 0) for each in applied.values())])
        others = {host: deletion.rows for host, deletion in found.items()}
        done = Applied(
            host=self._host, by=self._host, t=now, rows=rows, files=own.files, labels=own.labels, others=others,
            problem=problem,
        )  # fmt: skip
        write_applied(self.records.files, request, done)
        log.info("%d rows of %s were deleted on request %d", rows, request.model, request.seq)
        self._seen.pop(key, None)
        self._found.pop(key, None)

    def _forget(self, request: ForgetRequest) -> dict[str, Deletion]:
        """Deletes the rows; returns what was deleted of each host. The leading watcher deletes the labels of all hosts'
        rows, and has the store keep that before any row is deleted: the next leader would not find them. It also
        deletes the rows of other hosts in the store, because its copies of them are followed; their homes are left to
        them."""
        model, where = request.model, request.where
        records, hosts, found = self.records, [self._host], Deletion()
        if led := self._copies.leads(model):
            led.records.take_away(model)
            records = self._copies.records
            found = self._forget_in(StoreHours(records, model), where, remove=False)
            found += self._forget_here(model, where, remove=False)
            if found.rows:
                led.keep()
            hosts += sorted(set(records.files.names(f"{RECORDS}{model}/")) - {self._host})
        deleted = {host: self._forget_in(StoreHours(records, model, [host]), where) for host in hosts}
        here, own = self._forget_here(model, where), deleted[self._host]
        if here.rows or found.rows:
            labels.count_again(model, self._state())
        # What was uploaded is here as well, unless it was deleted here to make room.
        deleted[self._host] = Deletion(
            rows=max(here.rows, own.rows),
            files=max(here.files, own.files),
            labels=here.labels + own.labels + found.labels,
        )
        return deleted

    def _forget_here(self, model: str, where: str, *, remove: bool = True) -> Deletion:
        if not captures_folder(self._home, model).is_dir():
            return Deletion()
        if not set(parse(where).columns) <= column_types(self._home, model).keys():
            return Deletion(leftovers=tidy(self._home, model))
        return self._forget_in(HomeHours(self._home, model), where, remove=remove)

    def _forget_in(self, hours: Hours, where: str, *, remove: bool = True) -> Deletion:
        return forget(hours, where, remove=remove, also=_labels(hours.model, self._state()))

    def _drop_copies(self, model: str, done: Collection[str]) -> bool:
        """Deletes copies of files that a host has replaced, or is still to replace. False: one is being read."""
        listing = self.records.listing(model)
        theirs = [file for file in listing if file.writer.host in done]
        followed = self._copies.drop_outdated(model, listing if self._copies.leads(model) else theirs)
        return self.records.drop_outdated(model, theirs) and followed

    def _state(self) -> Path:
        """The home with the labels: those of all hosts, if this watcher leads."""
        return state_home(self._home) or self._home

    def _waits_for_leader(self, request: ForgetRequest) -> bool:
        """Whether the leading watcher has still to delete the labels of the rows, which it finds by the rows in the
        store."""
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
                    found = forget(StoreHours(self.records, model, [host]), request.where)
                    report = Applied(host=host, by=self._host, t=now, rows=found.rows, files=found.files)
                    write_applied(files, request, report)

    def _expire(self, model: str, now: float | None) -> None:
        uploaded = {file.version for file in self.records.listing(model)}
        limits = capture_limits(self._settings, model, {*versions_captured(self._home, model), *uploaded})
        expire(StoreHours(self.records, model), limits, now)


class FollowedCopies:
    """The copies of all hosts' records that the duties of the leading watcher follow. `follows`: of which models."""

    def __init__(self, home: Path, records: SharedRecords, follows: Callable[[str], bool]) -> None:
        self._home, self.records, self._follows = home, records, follows
        self._led: Led | None = None
        self._copied: dict[str, dict[Folder, list[SharedFile]]] = {}  # by model

    def leads(self, model: str) -> Led | None:
        """What the leading watcher has, if it is this one and follows the model."""
        led = led_by(self._home)
        if led is not self._led:
            self._led, self._copied = led, {}
        return led if led and self._follows(model) else None

    def drop_outdated(self, model: str, listing: Iterable[SharedFile]) -> bool:
        self._copied.pop(model, None)  # all are looked at again
        return self.records.drop_outdated(model, listing)

    def update(self, model: str, asked: set[int], applied: set[str], *, compare: bool) -> None:
        """Copies what is new. Rows that a host was asked to delete and has not deleted yet are deleted in the store
        before, with their labels. `asked`: the numbers of all requests. `applied`: the keys of what hosts have done.
        `compare`: all copies are compared with the store."""
        led = self.leads(model)
        counted = (
            self.records.counters(model) if led else {}
        )  # before the files: those that they count are there
        listing = self.records.listing(model) if led or compare else []
        if led and compare:
            led.records.take_away(model)
        if compare:
            self.drop_outdated(model, listing)
        if led is None:
            return
        late = {writer.host: asked - applied_by(applied, writer.host).get(model, set()) for writer in counted}
        copied = self._copied.setdefault(model, {})
        for folder, files in folders(listing):
            if copied.get(folder) != (current := in_force(files)):
                led.records.take_away(model)
                self._copy(folder, current, late[folder[0].host], led.state)
                copied[folder] = current
        sources = {
            writer.id: Source(self.records.home_of(writer), int(counts.get("last", 0)))
            for writer, counts in counted.items()
        }
        led.records.give(model, sources)

    def _copy(self, folder: Folder, files: list[SharedFile], late: set[int], state: Path) -> None:
        model = folder[0].model
        for request in read_requests(self.records.files, model) if late else ():
            if request.seq in late:
                with suppress(ExpressionError):  # its host reports that
                    hours = StoreHours(self.records, model)
                    forget(hours, request.where, only=[folder], also=_labels(model, state))
        current = in_force(self.records.hour(folder)) if late else files
        if current:
            self.records.fetch(folder, current)


def _labels(model: str, home: Path) -> list[Forgotten]:
    return [lambda version, rows: labels.forget(model, {version: rows}, home)]
