"""Notices processes of the stack that live and do not work, and ends them: the supervisor then starts new ones.

A process is frozen when it is stopped (SIGSTOP), when a child without which it does not work has ended, or when it
gives no sign of life although nothing keeps it from running. Signs are the beats of its main loop
(machine/heartbeat.py) and, of the gateway, answers to a request. Time in which a process computes, waits for a core or
waits for a disk does not count: on a busy machine a process is slow, not frozen. Nor does time in which this watchdog
could not run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from serin.host.exec_wrapper import stat_of
from serin.machine.heartbeat import read_beat
from serin.machine.in_memory import socket_folder

SILENT_S: Final = 6.0  # idle and without a sign of life
STOPPED_LOOKS: Final = 2  # a debugger's or a shell's short stop is none
LOOK_S: Final = 1.0
REPORTED_S: Final = 600.0  # after which a replaced process is history
_LONGEST_S: Final = 2 * LOOK_S  # more passed because the watchdog itself could not run
_BUSY: Final = 0.02  # the share of a second in which a thread that works runs or waits for a core
_KEPT: Final = 200
_REQUEST: Final = b"GET /v2/health/live HTTP/1.1\r\nHost: serin\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is seen of a process at time `t`. `sign`: the last sign of life, None before the first; `quiet_until`:
    until when it may be silent; `ran_s`: how long its main thread has run or waited for a core so far."""

    t: float
    state: str
    sign: float | None = None
    quiet_until: float = 0.0
    ran_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What is known of a process after several looks."""

    last: Look
    stopped: int = 0
    silent_s: float = 0.0

    @property
    def problem(self) -> str:
        """Why it counts as frozen; empty while it does not."""
        if self.stopped >= STOPPED_LOOKS:
            return "it was stopped by a signal (SIGSTOP)"
        if self.silent_s >= SILENT_S:
            return f"its main loop gave no sign of life for {self.silent_s:.0f} s and did not compute"
        return ""


def after_look(life: Life | None, now: Look) -> Life:
    """Returns what is known after one more look. Pure."""
    stopped = now.state == "T"
    if life is None:
        return Life(last=now, stopped=int(stopped))
    if stopped:
        return replace(life, last=now, stopped=life.stopped + 1)
    passed_s = now.t - life.last.t
    if now.sign is None or now.sign != life.last.sign or now.t <= now.quiet_until:
        return Life(last=now)
    busy = now.state in ("D", "t") or now.ran_s - life.last.ran_s > _BUSY * passed_s
    silent_s = life.silent_s if busy else life.silent_s + min(passed_s, _LONGEST_S)
    return Life(last=now, silent_s=silent_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A frozen process that was ended."""

    t: float  # seconds since 1970
    name: str
    pid: int
    reason: str


class Watchdog:
    """Looks at the children of the supervisor, at most once in LOOK_S."""

    def __init__(self, home: Path, programs: Path, report: Callable[[str], None]) -> None:
        self._home, self._programs, self._report = home, programs, report
        self._lives: dict[int, Life] = {}
        self._questions: dict[int, Question] = {}
        self._families: dict[int, Family] = {}  # by the process whose whole group does its work
        self._at = 0.0

    def look(self, children: Iterable[tuple[str, int]]) -> None:
        """`children`: the name and the process of each that should work now."""
        t = time.monotonic()
        if t < self._at + LOOK_S:
            return
        self._at, found = t, {pid: name for name, pid in children}
        for pid in {*self._lives} - {*found}:
            self._forget(pid)
        for pid in {*found} - {*self._lives}:
            self._learn(found[pid], pid)
        groups = group_states(self._families)
        for pid, name in found.items():
            with contextlib.suppress(OSError):  # it has ended
                problem = self._problem(pid, t, groups)
                if problem:
                    self._replace(name, pid, problem)

    def _learn(self, name: str, pid: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            description = json.loads((self._programs / f"{name}.json").read_text())
            if description.get("asks"):
                self._questions[pid] = Question(description["asks"])
            if leaves := description.get("leaves"):
                self._families[pid] = Family(pid, leaves.get("children", ""))

    def _problem(self, pid: int, t: float, groups: Mapping[int, Mapping[int, Member]]) -> str:
        """Looks once; returns why the process counts as frozen. Raises OSError when it is gone."""
        family, now = self._families.get(pid), self._seen(pid, t)
        if family is not None:
            members = groups.get(pid, {})
            if lost := family.lost(members):
                return f"its child process {min(lost)} has ended"
            stopped = any(each.state == "T" for each in members.values())
            now = replace(now, state="T") if stopped else now
        self._lives[pid] = after_look(self._lives.get(pid), now)
        return self._lives[pid].problem

    def _seen(self, pid: int, t: float) -> Look:
        state, ran_s = stat_of(pid)[0], ran_for_s(pid)
        if question := self._questions.get(pid):
            return Look(t=t, state=state, sign=question.answered_at(t), ran_s=ran_s)
        beat = read_beat(beat_file(self._home, pid))
        return Look(t=t, state=state, sign=beat, quiet_until=beat or 0.0, ran_s=ran_s)

    def _replace(self, name: str, pid: int, reason: str) -> None:
        self._report(f"{name} (process {pid}) is frozen: {reason}; replacing it")
        self._forget(pid)
        note_replaced(self._home, Replaced(t=time.time(), name=name, pid=pid, reason=reason))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _forget(self, pid: int) -> None:
        self._lives.pop(pid, None)
        self._families.pop(pid, None)
        beat_file(self._home, pid).unlink(missing_ok=True)
        if question := self._questions.pop(pid, None):
            question.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of a group: its state, and the process that started it."""

    state: str
    parent: int


class Family:
    """The children of one process that it cannot do without, by their name."""

    def __init__(self, leader: int, name: str) -> None:
        self._leader, self._name = leader, name
        self._seen: set[int] = set()
        self._known: set[int] = set()

    def lost(self, members: Mapping[int, Member]) -> set[int]:
        """Returns those that were there at two looks and are gone. A child forks others, which have its name until they
        become something else: those have another parent."""
        gone = {pid for pid in self._known if pid not in members or members[pid].state in ("Z", "X")}
        here = {pid for pid, each in members.items() if each.parent == self._leader and each.state != "Z"}
        here = {pid for pid in here if self._name and _name_of(pid) == self._name}
        self._known |= here & self._seen
        self._seen = here
        return gone


class Question:
    """A request over a unix socket that is sent at one look and whose answer is read at a later one: the supervisor
    must not wait."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._asked: socket.socket | None = None
        self._answered: float | None = None

    def answered_at(self, t: float) -> float | None:
        """Returns when the last answer was seen; None before the first."""
        with contextlib.suppress(BlockingIOError):  # not yet
            if self._asked is not None:
                answered = self._asked.recv(64).startswith(b"HTTP/1.1 200")
                self._answered = t if answered else self._answered
            self._ask()
        return self._answered

    def _ask(self) -> None:
        self.close()
        asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            asked.connect(self._path)
            asked.sendall(_REQUEST)
            self._asked = asked
        except OSError:  # nobody listens, or too many wait to be heard
            asked.close()

    def close(self) -> None:
        if self._asked is not None:
            self._asked.close()
        self._asked = None


def ran_for_s(pid: int) -> float:
    """Returns for how long the main thread of `pid` has run or waited for a core. Raises OSError when it is gone."""
    try:
        ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9
    except (FileNotFoundError, ValueError):  # a kernel that does not count: all of its threads, in ticks
        user, system = stat_of(pid)[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def group_states(leaders: Collection[int]) -> dict[int, dict[int, Member]]:
    """Returns the processes in the groups that these processes began."""
    found: dict[int, dict[int, Member]] = {leader: {} for leader in leaders}
    for entry in Path("/proc").iterdir() if leaders else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                state, parent, group, *_ = stat_of(int(entry.name))
                if int(group) in found:
                    found[int(group)][int(entry.name)] = Member(state=state, parent=int(parent))
    return found


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def beat_file(home: Path, pid: int) -> Path:
    return socket_folder(home) / "beats" / str(pid)


def is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped the process; False also when it has ended."""
    with contextlib.suppress(OSError):
        return stat_of(pid)[0] == "T"
    return False


def silent_for_s(home: Path, pid: int) -> float:
    """Returns for how long a process has been silent beyond what it announced; 0 for one that never gave a sign."""
    beat = read_beat(beat_file(home, pid))
    return 0.0 if beat is None else max(0.0, time.monotonic() - beat)


def note_replaced(home: Path, replaced: Replaced) -> None:
    """Keeps a record for `serin status` and the watcher. A full disk must not keep the process from being replaced."""
    with contextlib.suppress(OSError):
        kept = [*read_replaced(home), replaced][-_KEPT:]
        scratch = _replaced_file(home).with_suffix(".new")
        scratch.write_text(json.dumps([asdict(each) for each in kept]))
        scratch.replace(_replaced_file(home))


def read_replaced(home: Path) -> list[Replaced]:
    """Returns the processes that were replaced since the supervisor started, the latest last."""
    try:
        return [Replaced(**each) for each in json.loads(_replaced_file(home).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def forget_lives(home: Path) -> None:
    """Removes the beats and records that an earlier supervisor left."""
    shutil.rmtree(socket_folder(home) / "beats", ignore_errors=True)
    _replaced_file(home).unlink(missing_ok=True)


def _replaced_file(home: Path) -> Path:
    return socket_folder(home) / "replaced.json"
