"""The agent's link to the store: a thread that reads the desired state and the peers, and uploads report and evidence.

It runs beside the agent's loop, which must not wait for a store that does not answer: without the store the host keeps
serving by the last desired state, which is kept on disk.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from serin.cluster.agent.evidence import EvidenceUpload
from serin.cluster.agent.replays import Replays
from serin.cluster.agent.settings import DESIRED, agent_folder
from serin.cluster.hosts import load_foreign
from serin.cluster.shared_keys import SharedKeys
from serin.errors import HostNameTaken, ObjectChanged, ObjectExists, SerinError
from serin.formats.cluster.desired_state import PREFIX, DesiredState, key_of
from serin.formats.cluster.host_report import AgentReport, agent_key
from serin.machine.durable import write_whole
from serin.serving.envoy.keys import KeyFile
from serin.store.objects import Objects

log = logging.getLogger(__name__)

T = TypeVar("T")

ROUND_S: Final = 1.0
_TAG_FILE: Final = "report_tag"
_PEERS_AT_ONCE: Final = 8
_LOOK_BACK_ROUNDS: Final = 30
_UNCHANGED_ROUNDS: Final = 5  # a report that nobody has written for so long has no agent
SILENT_S: Final = 5.0


class Link:
    """`open_store` is called in the thread, again until it succeeds. `on_news` is called when the desired state or the
    peers have changed. `folder`: for the last desired state, the last reports of the peers, and how far `request_log`
    was cut. `keys`: the copy of the keys that all hosts share; None: this host has its own.

    `desired`: the newest desired state; None: this host has never seen one. `problem`: why the store was not reached in
    the last round; empty: it was.
    """

    def __init__(
        self,
        host: str,
        open_store: Callable[[], Objects],
        *,
        folder: Path,
        request_log: Path,
        replays: Replays,
        keys: KeyFile | None = None,
        on_news: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._open, self._kept = host, open_store, folder / DESIRED
        self._evidence = EvidenceUpload(folder / "evidence.json", host=host, request_log=request_log)
        self._replays, self._keys, self._on_news, self._clock = replays, keys, on_news, clock
        self._peers, self._peers_kept = PeerBook(host), folder / "peers.json"
        self._lock = threading.Lock()  # of the peers
        self._objects: Objects | None = None
        self.desired = _read_kept(self._kept, DesiredState.load)
        _read_kept(self._peers_kept, lambda content: self._peers.restore(content, self._clock()))
        self._report: AgentReport | None = None
        self._own = OwnReport(host, folder / _TAG_FILE)
        self._beat, self._rounds = 0, 0
        self.problem = ""
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, wait_s: float) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(wait_s)

    @property
    def knows_peers(self) -> bool:
        """Whether peers were read since this process began; until then it may know too few of them."""
        return self._rounds > 0

    def peers_of(self, releases: set[str]) -> dict[str, tuple[str, ...]]:
        with self._lock:
            return self._peers.ready(releases)

    def others_of(self, desired: DesiredState) -> dict[str, tuple[str, ...]]:
        with self._lock:
            return self._peers.known(desired)

    def tell(self, report: AgentReport) -> None:
        """Sets what the next rounds upload; `beat` and `evidence_seq` are set there. A change is uploaded at once."""
        before, self._report = self._report, report
        if before is None or _essence(before) != _essence(report):
            self._wake.set()  # the controller waits for it

    def round(self) -> None:
        """One exchange with the store. Raises StoreUnreachable, and HostNameTaken while another agent has this name."""
        self.receive()
        self.send()

    def receive(self) -> None:
        """Reads what this host is to do, and what its peers report."""
        if self._objects is None:
            self._objects = self._open()
        self._own.claim(self._objects)
        newer = self._read_desired(self._objects)
        changed = self._read_peers(self._objects, newer or self.desired)
        self._rounds += 1
        if newer is not None:  # not before its peers are known: routes to them would be left out
            self.desired = newer
        if newer is not None or changed:
            self._on_news()

    def send(self) -> None:
        """Writes what this host reports, and its evidence."""
        assert self._objects is not None, "received before"
        self._write_report(self._objects)
        if self.desired is not None and (report := self._report) is not None:
            self._evidence.step(self._objects, self.desired, report.desired_seq)
            self._replays.step(self._objects, self.desired)
        if self._keys is not None and SharedKeys(self._objects, self._keys).pull()[1]:
            self._on_news()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._clock()
            self._wake.clear()
            problem = ""
            try:
                self.round()
            except (OSError, SerinError) as error:
                problem = str(error)
            before, self.problem = self.problem, problem
            if problem and not before:
                log.warning("no exchange with the store, serving continues: %s", problem)
            elif before and not problem:
                log.info("the exchange with the store works again")
            self._wake.wait(max(0.0, ROUND_S - (self._clock() - began)))

    def _read_desired(self, objects: Objects) -> DesiredState | None:
        """Returns a newer desired state; None when there is none. It is kept on disk where the disk takes it."""
        seq = self.desired.seq if self.desired else 0
        newer = objects.keys(PREFIX, after=key_of(seq) if seq else "")
        if not newer and seq and self._rounds % _LOOK_BACK_ROUNDS == 0 and objects.read(key_of(seq)) is None:
            newer = objects.keys(PREFIX)  # the store was replaced: its numbers began again
        if not newer or (found := objects.read(newer[-1])) is None:
            return None
        desired = load_foreign(DesiredState, found.content, newer[-1])
        if desired is None:
            return None
        _keep(self._kept, found.content)
        return desired

    def _read_peers(self, objects: Objects, desired: DesiredState | None) -> bool:
        """Reads what some peers report; True when other peers can be asked than before."""
        if desired is None:
            return False
        with self._lock:
            before = self._peers.ready(desired.hosts), self._peers.known(desired)
            hosts = self._peers.hosts(desired)[:_PEERS_AT_ONCE]
        for host in hosts:
            found = objects.read(agent_key(host))
            report = load_foreign(AgentReport, found.content, agent_key(host)) if found else None
            with self._lock:
                self._peers.note(host, report, self._clock())
        with self._lock:
            changed = before != (self._peers.ready(desired.hosts), self._peers.known(desired))
            content = self._peers.dump()
        if changed:
            _keep(self._peers_kept, content)
        return changed

    def _write_report(self, objects: Objects) -> None:
        report = self._report
        if report is None:
            return
        self._beat += 1
        # Of a restarted agent, too, the beat is another one than before.
        beat = max(self._beat, time.time_ns() // 1_000_000)
        self._own.write(
            objects, replace(report, beat=beat, t=time.time(), evidence_seq=self._evidence.seq).dump()
        )


def tag_file(home: Path) -> Path:
    return agent_folder(home) / _TAG_FILE


class OwnReport:
    """This host's report, which one agent alone may write: of two with the same name the second one is refused.

    `kept`: the file with the tag of what was written last, so that the next process knows it as its own.
    """

    def __init__(self, host: str, kept: Path) -> None:
        self._host, self._key, self._kept = host, agent_key(host), kept
        self._tag: str | None = None  # None: not claimed yet
        self._sent = b""
        self._seen: tuple[str, int] = ("", 0)  # the tag of a foreign report, and for how many rounds

    def claim_at_last(self, objects: Objects) -> None:
        """Claims the report, or raises HostNameTaken after having seen that another agent keeps writing it."""
        for left in reversed(range(_UNCHANGED_ROUNDS + 1)):
            try:
                self.claim(objects)
                return
            except HostNameTaken:
                if not left:
                    raise
            time.sleep(ROUND_S)

    def claim(self, objects: Objects) -> None:
        """Raises HostNameTaken unless the report is this agent's, or nobody has written it for some rounds."""
        if self._tag is not None:
            return
        found = objects.read(self._key)
        if found is None or found.content == self._sent or found.tag == self._read_kept():
            self._tag = found.tag if found else ""
            return
        tag, rounds = self._seen
        self._seen = (found.tag, rounds + 1 if found.tag == tag else 0)
        if self._seen[1] >= _UNCHANGED_ROUNDS:
            self._tag = found.tag
            return
        report = load_foreign(AgentReport, found.content, self._key)
        raise HostNameTaken(host=self._host, address=report.address if report else "unknown")

    def write(self, objects: Objects, content: bytes) -> None:
        """Replaces the report. Raises HostNameTaken when another agent has written it since."""
        before, self._tag, self._sent = self._tag, None, content
        try:
            tag = (
                objects.replace(self._key, content, before) if before else objects.create(self._key, content)
            )
        except (ObjectChanged, ObjectExists):
            self._seen = ("", 0)
            self.claim(objects)  # it was forgotten, or an answer was lost
            return
        self._tag = tag
        with contextlib.suppress(OSError):  # without it, the next process waits for some rounds
            self._kept.write_text(tag)

    def _read_kept(self) -> str | None:
        try:
            return self._kept.read_text()
        except (OSError, ValueError):
            return None


def _essence(report: AgentReport) -> object:
    """Returns what others act on."""
    releases = {name: replace(found, active_requests=0) for name, found in report.releases.items()}
    return report.desired_seq, report.problem, releases


def _keep(kept: Path, content: bytes) -> None:
    """Writes a file for the next process. Also a host whose disk is full follows the store."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, content)
    except OSError as error:
        log.warning("%s cannot be kept: %s", kept.name, error)


def _read_kept(kept: Path, load: Callable[[bytes], T]) -> T | None:
    try:
        return load(kept.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s cannot be read: %s", kept, error)
        return None


# A peer counts as silent when its beat does not change, by this host's own clock, and only while this host can read
# reports: if the store is gone, the peers are not.
@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    report: AgentReport
    changed_at: float
    read_at: float


class PeerBook:
    def __init__(self, host: str) -> None:
        self._host = host
        self._entries: dict[str, _Entry] = {}

    def dump(self) -> bytes:
        """Returns the reports, for a process that begins while they cannot be read."""
        return json.dumps(
            {host: entry.report.dump().decode() for host, entry in self._entries.items()}
        ).encode()

    def restore(self, content: bytes, t: float) -> None:
        """Takes the reports of `dump` as read at `t`. Raises ValueError, TypeError or KeyError for anything else."""
        for host, report in json.loads(content).items():
            self.note(host, AgentReport.load(report.encode()), t)

    def hosts(self, desired: DesiredState) -> list[str]:
        """Returns the other hosts that run something, in the order in which they should be read."""
        named = {host for hosts in desired.hosts.values() for host in hosts} - {self._host}
        for gone in {*self._entries} - named:
            del self._entries[gone]
        read_at = {host: entry.read_at for host, entry in self._entries.items()}
        return sorted(named, key=lambda host: (read_at.get(host, float("-inf")), host))

    def note(self, host: str, report: AgentReport | None, t: float) -> None:
        """Records a report as it was read at `t`; None: the host has none (it was forgotten)."""
        if report is None:
            self._entries.pop(host, None)
            return
        before = self._entries.get(host)
        same = before is not None and before.report.beat == report.beat
        changed_at = before.changed_at if before is not None and same else t
        self._entries[host] = _Entry(report=report, changed_at=changed_at, read_at=t)

    def known(self, desired: DesiredState) -> dict[str, tuple[str, ...]]:
        """Returns by release the peers that should have it, whatever they report: what is left when none is ready."""
        return {
            name: tuple(
                sorted(
                    entry.report.peer
                    for host, entry in self._entries.items()
                    if host in hosts and entry.report.peer
                )
            )
            for name, hosts in desired.hosts.items()
        }

    def ready(self, releases: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Returns by release the peers on which it is ready and its golden rows are not wrong.

        Silent ones are left out where others have the release: they may be gone, or only cut off from the store.
        """
        found = {}
        for name in releases:
            having = [entry for entry in self._entries.values() if entry.report.peer and _has(entry, name)]
            heard = [entry for entry in having if entry.read_at - entry.changed_at <= SILENT_S]
            found[name] = tuple(sorted(str(entry.report.peer) for entry in heard or having))
        return found


def _has(entry: _Entry, name: str) -> bool:
    release = entry.report.releases.get(name)
    return release is not None and release.state == "ready" and not release.verified
