"""The watcher's duty where several hosts share a store: one of their watchers leads and watches for all of them.

Every watcher reports its host's counts and alerts. What the leader's duties know is in a separate home, which is kept
in the store: the next leader continues with it. Nothing leaves a leader, no alert and no rollback, before the store has
what it follows from, and before it is sure that it leads. A thread does all of this: recording waits for nothing here.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from serin.errors import LeadershipLost, SerinError
from serin.host.wiring import WATCHER
from serin.machine import environment
from serin.machine.audit import one_line
from serin.machine.documents import UNFIT
from serin.machine.durable import make_private
from serin.machine.in_memory import write_problems
from serin.machine.typed_json import Document
from serin.monitoring.alerts.alert import Alert, Alerts
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.monitoring.history.read import HostHour, hours_counted, minutes_of
from serin.monitoring.history.store import History
from serin.rollout.run.leadership import Leadership, new_holder
from serin.store.mirror import Mirror
from serin.store.objects import Objects
from serin.watcher.cluster_state import ANSWERS, FOLDERS, HOSTS, LEADER, PREFIX, Request, obey
from serin.watcher.duty import Commit, Duty, Rounds
from serin.watcher.served import FollowedRecords, lead, watched_statuses

log = logging.getLogger(__name__)

MakeDuties = Callable[[Path, AlertBook, Commit], Sequence[Duty]]

_STEP_S: Final = 1.0
_REPORT_S: Final = 4.0
_FRESH_S: Final = 30.0  # a report is written this often, also if it has not changed ...
_SILENT_S: Final = 120.0  # ... and counts no more when it is so old
_HOUR_S: Final = 3600
_LATE_S: Final = 2 * _HOUR_S  # after its end a host adds nothing to an hour
_KEPT_S: Final = 3 * 86_400.0
_SHARE: Final = 0.05  # of the time that uploading everything may take
_LEAST_S: Final = 2.0
_ANSWERS_S: Final = 600.0
_OWN_ID: Final = re.compile(r"[0-9]{8}T[0-9A-Za-z-]{1,56}")  # no model's name begins so
# What bad requests raise.
_UNFIT: Final = (*UNFIT, OverflowError, sqlite3.IntegrityError, sqlite3.ProgrammingError)
_HOUR: Final = "%Y-%m-%dT%H"


class ClusterWatch(Duty):
    """`make`: the duties of the leader in its home."""

    name, every_s = "cluster", 5.0

    def __init__(self, home: Path, objects: Objects, make: MakeDuties) -> None:
        self._home, self._objects, self._make = home, objects, make
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def tick(self, now: float) -> None:
        del now
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cluster watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STEP_S + 5.0)

    def _run(self) -> None:
        leadership = Leadership(self._objects, new_holder(), key=LEADER)
        election = threading.Thread(
            target=leadership.run, args=(self._stop,), name="watcher election", daemon=True
        )
        election.start()
        report, led, told = HostReport(self._home, self._objects), list[Led](), ""
        while not self._stop.is_set():
            try:
                self._step(leadership, report, led)
                told = ""
            except LeadershipLost as error:
                log.warning("this watcher leads no more: %s", error)
                leadership.lose(led[0].term if led else 0)
            except (SerinError, OSError, sqlite3.Error, ValueError) as error:
                if str(error) != told:
                    log.warning("watching for all hosts waits: %s", error)
                    told = str(error)
            self._stop.wait(_STEP_S)
        self._end(led)
        election.join(_STEP_S + 1.0)
        with suppress(SerinError, OSError):
            leadership.resign()

    def _step(self, leadership: Leadership, report: HostReport, led: list[Led]) -> None:
        term = leadership.term
        if led and led[0].term != term:
            self._end(led)
        if term is not None and not led:
            led.append(Led(self._home, self._objects, leadership, term, self._make))
        if led:
            led[0].run(time.time())
        report.send(time.time())

    def _end(self, led: list[Led]) -> None:
        if led:
            led.pop().close()


class Led:
    """One term of this process: begins with what the store has."""

    def __init__(
        self, home: Path, objects: Objects, leadership: Leadership, term: int, make: MakeDuties
    ) -> None:
        self.term, self._home, self._leadership = term, home, leadership
        self.state = make_private(home / "cluster-watch")  # the home of the leader's duties
        self.records = FollowedRecords()
        self._mirror = Mirror(objects, PREFIX, self.state, FOLDERS)
        self._mirror.adopt(term)
        book = AlertBook(self.state)
        everyone = HostsDuty(self.state, objects, book)
        asked = RequestsDuty(self.state, objects, partial(self._push, "alerts", "labels"))
        self._rounds = Rounds([everyone, asked, *make(self.state, book, self.commit)], away_s=2.0)
        self._due, self._failing = 0.0, dict[str, str]()
        lead(home, self)

    def keep(self) -> None:
        self._push()

    def commit(self) -> None:
        self._push("alerts", "watch/rollbacks")

    def run(self, now: float) -> None:
        self._rounds.run(now)
        began = time.monotonic()
        if began >= self._due:
            self._push()
            self._due = time.monotonic() + max(_LEAST_S, (time.monotonic() - began) / _SHARE)
        if self._rounds.failing != self._failing:
            with suppress(OSError):
                write_problems(self._home, f"{WATCHER}-cluster", self._rounds.failing)
                self._failing = dict(self._rounds.failing)

    def close(self) -> None:
        lead(self._home, None)
        self._rounds.close()

    def _push(self, *folders: str) -> None:
        self._leadership.check(self.term)
        self._mirror.push(self.term, *folders)
        self._leadership.check(self.term)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAlerts(Document, form="serin.host_alerts"):
    alerts: tuple[dict[str, Any], ...] = ()


class HostReport:
    """Tells the leader what this host's gateway was asked, and which alerts its watcher has."""

    def __init__(self, home: Path, objects: Objects) -> None:
        self._home, self._objects = home, objects
        self._prefix = f"{HOSTS}{environment.host()}/"
        self._sent: dict[str, tuple[bytes, float]] = {}
        self._since: int | None = None  # the first hour that may not be complete in the store
        self._due = 0.0

    def send(self, now: float) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _REPORT_S
        found = [asdict(each.alert) for each in read_alerts(self._home, resolved=0).open]
        self._put("alerts.json", HostAlerts(alerts=tuple(found)).dump())
        watched_statuses(self._home)  # for this host's metrics
        if self._since is None:
            known = [key.rpartition("/")[2] for key in self._objects.keys(f"{self._prefix}history/")]
            self._since = int(_began(max(known))) if known else 0
        hours = [hour for hour in hours_counted(self._home) if hour >= max(self._since, now - _KEPT_S)]
        for hour in hours:
            minutes = tuple(minutes_of(self._home, hour, hour + _HOUR_S))
            name = f"history/{datetime.fromtimestamp(hour, UTC):{_HOUR}}.json"
            self._put(name, HostHour(minutes=minutes).dump(), again=False)
        self._since = max([self._since, *(hour for hour in hours if hour < now - _LATE_S)])

    def _put(self, name: str, content: bytes, *, again: bool = True) -> None:
        before, at = self._sent.get(name, (b"", float("-inf")))
        if content != before or (again and time.monotonic() - at >= _FRESH_S):
            self._objects.put(self._prefix + name, content)
            if not again:  # of past hours nothing must be remembered
                self._sent = {key: each for key, each in self._sent.items() if key >= name or "/" not in key}
            self._sent[name] = content, time.monotonic()


class HostsDuty(Duty):
    """Takes in what the hosts report: adds up their requests, and has their alerts."""

    name, every_s = "hosts", 2.0

    def __init__(self, state: Path, objects: Objects, alerts: Alerts) -> None:
        self._objects, self._alerts, self._state = objects, alerts, state
        self._history = History(state)
        self._tags: dict[str, str] = {}  # by key: of the hours that were counted
        self._tidied = float("-inf")

    def tick(self, now: float) -> None:
        keys = self._objects.keys(HOSTS)
        hosts = sorted({key.removeprefix(HOSTS).partition("/")[0] for key in keys})
        reported, silent = dict[str, Alert](), set[str]()
        for host in hosts:
            self._count(host, [key for key in keys if key.startswith(f"{HOSTS}{host}/history/")], now)
            found = self._reported(host)
            reported |= found or {}
            silent |= {host} if found is None else set()
        for alert in reported.values():
            self._alerts.fire(alert, now)
        for record in read_alerts(self._state, resolved=0, now=now).open:
            about = record.alert.facts.get("host")
            if about is not None and record.alert.key not in reported:
                closed = "" if about in {*hosts} - silent else f"host {about} does not report any more"
                self._alerts.resolve(record.alert.key, now, closed=closed)
        if time.monotonic() - self._tidied >= 60.0:
            self._tidied = time.monotonic()
            self._history.tidy(now)

    def _count(self, host: str, keys: Sequence[str], now: float) -> None:
        taken = self._history.taken(host)
        for key in keys:
            hour = key.rpartition("/")[2]
            if hour > taken and (stored := self._objects.read(key)):
                complete = now - _began(hour) > _HOUR_S + _LATE_S
                if complete or self._tags.get(key) != stored.tag:
                    minutes = HostHour.load(stored.content).minutes
                    self._history.take(host, minutes, complete=hour if complete else None)
                self._tags[key] = stored.tag
            elif hour <= taken and now - _began(hour) > _KEPT_S:
                self._objects.remove(key)
                self._tags.pop(key, None)

    def _reported(self, host: str) -> dict[str, Alert] | None:
        """The alerts of a host, by the keys that they have among those of all hosts; None: it does not report."""
        key = f"{HOSTS}{host}/alerts.json"
        stored = self._objects.read(key)
        if stored is not None and stored.age_s > _KEPT_S:
            self._objects.remove(key)  # a pod that was replaced, for example
        if stored is None or stored.age_s > _SILENT_S:
            return None
        alerts = [Alert(**each) for each in HostAlerts.load(stored.content).alerts]
        named = [
            replace(
                each,
                key=f"{each.key}@{host}",
                title=f"{each.title} (host {host})",
                facts={**each.facts, "host": host},
            )
            for each in alerts
        ]
        return {each.key: each for each in named}

    def close(self) -> None:
        self._history.close()


class RequestsDuty(Duty):
    """Does what people asked for. The store has it before they get an answer."""

    name, every_s = "requests", 1.0

    def __init__(self, state: Path, objects: Objects, keep: Commit) -> None:
        self._state, self._objects, self._keep = state, objects, keep
        self._tidied = float("-inf")

    def tick(self, now: float) -> None:
        del now
        for key in self._objects.keys(f"{PREFIX}/requests/"):
            if stored := self._objects.read(key):
                self._obey(key, stored.content)
        if time.monotonic() - self._tidied >= _ANSWERS_S:
            self._tidied = time.monotonic()
            for key in self._objects.keys(ANSWERS):
                if (stored := self._objects.read(key)) and stored.age_s > _ANSWERS_S:
                    self._objects.remove(key)

    def _obey(self, key: str, content: bytes) -> None:
        request: Request | None = None
        try:
            found = Request.load(content)
            if key != f"{PREFIX}/requests/{found.name}.json" or not _OWN_ID.fullmatch(found.id):
                raise ValueError(f"it is {found.name!r}, which differs from its object's name")
            request = found
            answer = obey(request, self._state, self._objects)
        except _UNFIT as error:
            log.warning("%s", one_line(f"{key} cannot be done and is removed: {error}"))
            self._remove(key, request)
            return
        self._keep()
        self._objects.put(f"{ANSWERS}{request.name}.json", answer.dump())
        self._remove(key, request)
        log.info("%s: %s", request.what, answer.refused or "done")

    def _remove(self, key: str, request: Request | None) -> None:
        """Removes a request, with its labels. `request`: None for what is not one, or not by its own name."""
        self._objects.remove(key)
        if request is not None and request.what == "add_labels":
            self._objects.remove(request.labels)


def _began(name: str) -> float:
    return datetime.strptime(name.removesuffix(".json"), _HOUR).replace(tzinfo=UTC).timestamp()
