"""The watcher's duty that shares records with other hosts through a store: applies requests to delete rows, uploads
what is new, and deletes what is old in the store. The leading watcher also copies the records of all hosts, which its
other duties follow. A thread talks to the store: nothing else of the watcher waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

from serin.errors import SerinError, StoreUnreachable
from serin.expressions import ExpressionError, parse
from serin.formats.captures import captures_folder, in_force
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
from serin.monitoring.alerts.alert import Alerts
from serin.monitoring.capture.all_hosts import FOLLOWED, Folder, SharedRecords, folders
from serin.monitoring.capture.counters import models_captured
from serin.monitoring.capture.forget import Deletion, Forgotten, forget
from serin.monitoring.capture.merge import tidy
from serin.monitoring.capture.read import Source, column_types
from serin.monitoring.capture.retention import HomeHours, Hours, StoreHours
from serin.monitoring.capture.shared_upload import Uploader, uploadable
from serin.pipeline import labels
from serin.store.store import Store
from serin.watcher.capture_duty import ClockTrust, FailingModels, Settings, capture_settings, expire_by
from serin.watcher.cluster_state import LEADER
from serin.watcher.duty import Duty
from serin.watcher.event_keys import forget_events
from serin.watcher.served import Led, has_agent, led_by, state_home

log = logging.getLogger(__name__)

ROUND_S: Final = 20.0
_ALARM_S: Final = 600.0
_ALL: Final = ""  # the key of an error that concerns all models
_STOP_S: Final = 2.0
_BUFFERED_S: Final = 2.5  # an answer is in its ring a moment after the client has it


class ShareDuty(Duty):
    """Does nothing where records stay on this host."""

    name, every_s = "share", 5.0

    def __init__(self, home: Path, alerts: Alerts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._home, self._store, self._trust = home, shared_store(home), ClockTrust(clock)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: Mapping[str, Exception] = {}
        self._failing = FailingModels(
            alerts,
            "uploaded",
            "Recorded requests of {} cannot be uploaded",
            f"They are kept in {home / 'captures'} up to monitoring.capture.max_size and keep, and uploaded when that "
            "is possible again; requests are answered as before.",
            _ALARM_S,
        )

    def tick(self, now: float) -> None:
        if self._store is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._store,), name="share", daemon=True)
            self._thread.start()
        failed = self._failed
        everywhere = dict.fromkeys(models_captured(self._home), failed[_ALL]) if _ALL in failed else failed
        self._failing.report(everywhere, now)

    def close(self) -> None:
        """What is not uploaded is uploaded by the next watcher."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self, store: Store) -> None:
        sharing: ShareRound | None = None
        while not self._stop.is_set():
            now = time.time()
            try:
                sharing = sharing or ShareRound(self._home, store, capture_settings(store))
                sharing.prepare()
                self._failed = sharing.run(now, trusted=self._trust.at(now))
            except (OSError, SerinError, pa.ArrowException, ValueError) as error:
                self._failed = {_ALL: error}
            self._stop.wait(ROUND_S)


def shared_store(home: Path) -> Store | None:
    """The store to which this home uploads its records: a bucket, or any that an agent shares. None: they stay here."""
    url = environment.shared_store_url()
    if url is None:
        return None
    store = Store(url)
    return store if not store.local or has_agent(home) else None


class ShareRound:
    """`settings`: of a release. `care_s`: between two looks at what is old in the store."""

    def __init__(
        self,
        home: Path,
        store: Store,
        settings: Settings,
        *,
        host: str | None = None,
        care_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._settings, self._clock, self._care_s = home, settings, clock, care_s
        self._host = checked_host(host or environment.host())
        self.records = SharedRecords.of(store, home, FOLLOWED)
        self._uploader = Uploader(home, self.records, self._host)
        self._copies = FollowedCopies(home, self.records)
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
                    expire_by(self._settings, StoreHours(self.records, model), now if trusted else None)
                if cares or applied != self._applied:  # a host has replaced files since
                    self._copies.drop_outdated(model, self.records.listing(model))
                self._copies.update(model, asked.get(model, set()), applied)
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
            listing, done = self.records.listing(request.model), {self._host, *applied}
            replaced = [file for file in listing if file.writer.host in done]
            settled &= self._copies.drop_outdated(request.model, replaced)
        except ExpressionError as error:
            problem = str(error)
        if not settled and not problem:
            return
        labels.count_again(request.model, self._state())
        if led := led_by(self._home):
            led.keep()  # the next leader must not have these labels
        own = found.pop(self._host, Deletion())
        rows = max([own.rows, *(each.others.get(self._host, 0) for each in applied.values())])
        others = {host: deletion.rows for host, deletion in found.items() if deletion.rows}
        report = Applied(
            host=self._host, by=self._host, t=now, rows=rows, files=own.files, labels=own.labels, others=others,
            problem=problem,
        )  # fmt: skip
        write_applied(self.records.files, request, report)
        log.info("%d rows of %s were deleted on request %d", rows, request.model, request.seq)
        self._seen.pop(key, None)
        self._found.pop(key, None)

    def _forget(self, request: ForgetRequest) -> dict[str, Deletion]:
        """Deletes the rows here and in what this host wrote; returns what was found of each host. The leading watcher
        first deletes the labels of all hosts' rows, and has the store keep that: the next leader would not find them.
        Rows of other hosts in the store are deleted before they are followed (FollowedCopies)."""
        model, where = request.model, request.where
        found, count = dict[str, Deletion](), 0
        if led := led_by(self._home):
            self._copies.take_away(model)
            for host in self.records.files.names(f"{RECORDS}{model}/"):
                found[host] = self._forget_in(StoreHours(self.records, model, [host]), where, remove=False)
            here = self._forget_here(model, where, remove=False)
            count = sum(each.labels for each in (here, *found.values()))
            if here.rows or any(each.rows for each in found.values()):
                led.keep()
                labels.count_again(model, self._state())
        own = self._forget_in(StoreHours(self.records, model, [self._host]), where)
        here = self._forget_here(model, where)
        if here.rows:
            labels.count_again(model, self._state())
        # What was uploaded is here as well, unless it was deleted here to make room.
        rows, files = max(here.rows, own.rows), max(here.files, own.files)
        deletion = Deletion(rows=rows, files=files, labels=here.labels + own.labels + count)
        return {**found, self._host: deletion}

    def _forget_here(self, model: str, where: str, *, remove: bool = True) -> Deletion:
        if not captures_folder(self._home, model).is_dir():
            return Deletion()
        if not set(parse(where).columns) <= column_types(self._home, model).keys():
            return Deletion(leftovers=tidy(self._home, model))
        return self._forget_in(HomeHours(self._home, model), where, remove=remove)

    def _forget_in(self, hours: Hours, where: str, *, remove: bool = True) -> Deletion:
        events = [forget_events(self._home, hours.model, where)] if remove else []
        return forget(hours, where, remove=remove, also=[*_labels(hours.model, self._state()), *events])

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


class FollowedCopies:
    """The copies of all hosts' records that the duties of the leading watcher follow."""

    def __init__(self, home: Path, records: SharedRecords) -> None:
        self._home, self._records = home, records
        self._led: Led | None = None
        self._copied: dict[str, dict[Folder, list[SharedFile]]] = {}  # by model

    def take_away(self, model: str) -> None:
        """Nobody follows the copies of a model until they are updated."""
        if led := led_by(self._home):
            led.records.take_away(model)

    def drop_outdated(self, model: str, listing: Iterable[SharedFile]) -> bool:
        """Deletes copies of files that are not in `listing`; all others are looked at again. False: one is being
        read."""
        self.take_away(model)
        self._copied.pop(model, None)
        return self._records.drop_outdated(model, listing)

    def update(self, model: str, asked: set[int], applied: set[str]) -> None:
        """Copies what is new, if this watcher leads. Rows that a host was asked to delete and has not deleted yet are
        deleted in the store before, with their labels. `asked`: the numbers of all requests. `applied`: the keys of
        what hosts have done."""
        led = led_by(self._home)
        if led is not self._led:
            self._led, self._copied = led, {}
        if led is None:
            return
        counted = self._records.counters(model)  # before the files: those that they count are there
        copied = self._copied.setdefault(model, {})
        changed = {
            folder: current
            for folder, files in folders(self._records.listing(model))
            if copied.get(folder) != (current := in_force(files))
        }
        if changed:
            self.take_away(model)
        hosts = {writer.host for writer, _, _ in changed}
        late = {host: asked - applied_by(applied, host).get(model, set()) for host in hosts}
        requests = read_requests(self._records.files, model) if any(late.values()) else []
        for folder, files in changed.items():
            own = [each.where for each in requests if each.seq in late[folder[0].host]]
            try:
                self._copy(folder, files, own, led)
            except FileNotFoundError:  # replaced just now: the next round copies it
                return
            copied[folder] = files
        sources = {
            writer.id: Source(self._records.home_of(writer), int(counts.get("last", 0)))
            for writer, counts in counted.items()
        }
        led.records.give(model, sources)

    def _copy(self, folder: Folder, files: list[SharedFile], late: list[str], led: Led) -> None:
        hours, also = StoreHours(self._records, folder[0].model), _labels(folder[0].model, led.state)
        for where in late:
            with suppress(ExpressionError):  # its host reports that
                if forget(hours, where, only=[folder], remove=False, also=also).labels:
                    led.keep()
                forget(hours, where, only=[folder])
        if late:
            self._records.copy(folder)
        else:
            self._records.fetch(folder, files)


def _labels(model: str, home: Path) -> list[Forgotten]:
    return [lambda version, rows: labels.forget(model, {version: rows}, home)]
