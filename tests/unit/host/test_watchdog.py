"""Which processes count as frozen, and that the supervisor replaces them; supervisord is real and starts in 0.2 s."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from serin.host.process_scan import STACK_MARK, end_processes, group_members, stack_processes
from serin.host.state import Stack
from serin.host.supervisor import Supervisor, find_supervisor
from serin.host.watchdog import (
    REPORTED_S,
    SILENT_S,
    Family,
    Life,
    Look,
    Member,
    Replaced,
    after_look,
    beat_file,
    is_stopped,
    note_replaced,
    read_replaced,
)
from serin.machine.environment import child_environment
from serin.machine.in_memory import remove_sockets
from serin.machine.process import Leftovers
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.watcher.report_duties import ProcessesDuty
from tests.kit.stacks import stack_in
from tests.kit.waiting import until
from tests.signals import hit
from tests.unit.host.test_supervisor import sleeper

NOW = 1_800_000_000.0
SLEEPING = Look(t=0.0, state="S", sign=0.0)


def after(looks: list[Look]) -> Life:
    life = None
    for look in looks:
        life = after_look(life, look)
    assert life is not None
    return life


def seconds(count: int, **changes: float | str | None) -> list[Look]:
    """One look in each second, of a process that sleeps and is silent, with the same changes in each."""
    return [replace(SLEEPING, t=float(t), **changes) for t in range(count)]  # type: ignore[arg-type]


def test_a_process_that_sleeps_and_gives_no_sign_is_frozen_after_six_seconds() -> None:
    assert not after(seconds(int(SILENT_S))).problem
    assert "no sign of life" in after(seconds(int(SILENT_S) + 1)).problem


def test_a_stopped_process_is_frozen_at_the_second_look_and_a_short_stop_is_none() -> None:
    stopped = replace(SLEEPING, state="T")
    assert "SIGSTOP" in after([SLEEPING, stopped, replace(stopped, t=1.0)]).problem
    assert not after([stopped, replace(SLEEPING, t=1.0, sign=1.0), replace(stopped, t=2.0)]).problem


@pytest.mark.parametrize(
    ("healthy", "looks"),
    [
        ("it beats", [replace(SLEEPING, t=float(t), sign=float(t)) for t in range(600)]),
        ("it never gave a sign, as a foreign program", seconds(600, sign=None)),
        ("it said that it would wait", seconds(600, quiet_until=600.0)),
        ("it computes", [replace(SLEEPING, t=float(t), state="R", ran_s=t * 0.5) for t in range(600)]),
        # Two cores for 40 processes: it ran for no time at all and waited for a core all the time.
        ("it is starved", [replace(SLEEPING, t=float(t), state="R", ran_s=float(t)) for t in range(600)]),
        ("it waits for a disk", seconds(600, state="D")),
        ("somebody debugs it", seconds(600, state="t")),
        ("the watchdog was away", [SLEEPING, replace(SLEEPING, t=3600.0)]),
    ],
)
def test_a_process_that_is_only_slow_is_not_frozen(healthy: str, looks: list[Look]) -> None:
    life = None
    for look in looks:
        life = after_look(life, look)
        assert not life.problem, healthy


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path)
    pid = supervisor.launch(child_environment(**{STACK_MARK: str(tmp_path)}))
    yield supervisor
    end_processes([pid], grace_s=0.0)
    end_processes(stack_processes(tmp_path), grace_s=0.0)
    remove_sockets(tmp_path)


BEATS_ONCE = """if True:
    import threading
    from pathlib import Path
    from serin.host.standing import begin_beats
    begin_beats(Path({home!r}))
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


class Server:
    """Accepts requests on a unix socket; answers them until it is `silent`."""

    def __init__(self, path: Path) -> None:
        self.silent, self.answered = False, 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        kept = []
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.recv(1000)
                kept.append(connection)
                if not self.silent:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    self.answered += 1

    def close(self) -> None:
        self._listener.close()


def test_frozen_processes_are_replaced_and_recorded_and_others_are_left_alone(supervisor: Supervisor) -> None:
    """Stopped; with a stopped child; without a child that it needs; with a main loop that hangs; without answers."""
    home, place = supervisor.home, supervisor.socket.with_name("asked.sock")
    server = Server(place)
    owns = Leftovers(shared_memory="no-such-", children="sleep")
    hangs = (sys.executable, "-c", BEATS_ONCE.format(home=str(home)))
    plain, family = sleeper(supervisor), sleeper(supervisor, "sleep 600 & exec sleep 600")
    processes = [
        replace(plain, name="fine"), replace(plain, name="stopped"),
        replace(family, name="child-stopped", leaves=owns), replace(family, name="child-killed", leaves=owns),
        replace(plain, name="hangs", command=hangs), replace(plain, name="silent", asks=place),
    ]  # fmt: skip
    for process in processes:
        supervisor.start(process)
    until(lambda: all(child.state == "running" for child in supervisor.children()))
    first = {child.name: child.pid for child in supervisor.children() if child.pid}
    assert len(first) == len(processes)
    until(lambda: beat_file(home, first["hangs"]).exists())
    until(lambda: server.answered > 2)  # a question is asked when the answer to the last one was read
    server.silent = True
    hit(first["stopped"], signal.SIGSTOP)
    hit(_child(home, first["child-stopped"]), signal.SIGSTOP)
    hit(_child(home, first["child-killed"]))
    until(lambda: {each.name for each in read_replaced(home)} >= {*first} - {"fine"})
    reasons = {each.name: each.reason for each in read_replaced(home) if each.pid == first[each.name]}
    assert {*reasons} == {*first} - {"fine"}
    assert all("SIGSTOP" in reasons[name] for name in ("stopped", "child-stopped"))
    assert "has ended" in reasons["child-killed"]
    assert all("no sign of life" in reasons[name] for name in ("hangs", "silent"))
    until(
        lambda: all(supervisor.pid(name) not in (pid, None) for name, pid in first.items() if name != "fine")
    )
    assert supervisor.pid("fine") == first["fine"]
    assert f"stopped (process {first['stopped']}) is frozen" in supervisor.log.read_text()
    server.close()


def test_a_stopped_supervisor_is_named_and_its_children_are_found_without_it(supervisor: Supervisor) -> None:
    supervisor.start(sleeper(supervisor))
    until(lambda: supervisor.state("sleeper") == "running")
    stack = _stack(supervisor)
    assert find_supervisor(stack)[1] == ""
    book = AlertBook(stack.home)
    hit(stack.supervisor_pid, signal.SIGSTOP)
    until(lambda: is_stopped(stack.supervisor_pid))
    silent, problem = find_supervisor(stack)
    assert problem.startswith(f"FROZEN: process {stack.supervisor_pid} was stopped by a signal")
    assert [(child.name, child.state) for child in silent.children()] == [("sleeper", "running")]
    ProcessesDuty(stack.home, book).tick(NOW)
    assert [each.alert.key for each in read_alerts(stack.home).open] == ["stack/process/supervisor"]
    hit(stack.supervisor_pid, signal.SIGCONT)
    until(lambda: not is_stopped(stack.supervisor_pid))
    ProcessesDuty(stack.home, book).tick(NOW + 1)
    assert read_alerts(stack.home).open == ()


def test_a_replaced_process_is_reported_until_it_has_worked_for_a_while(home: Path) -> None:
    book = AlertBook(home)
    for name in ("gateway", "flights-v3"):
        note_replaced(home, Replaced(t=NOW, name=name, pid=7, reason="it was stopped"))
    ProcessesDuty(home, book).tick(NOW + 1)
    found = {each.alert.key: each.alert for each in read_alerts(home).open}
    assert {*found} == {"stack/process/gateway", "flights/process/flights-v3"}
    assert found["flights/process/flights-v3"].model == "flights"
    assert found["stack/process/gateway"].title == "gateway was frozen and was replaced"
    ProcessesDuty(home, book).tick(NOW + REPORTED_S + 1)
    assert read_alerts(home).open == ()
    remove_sockets(home)


def test_only_a_child_that_was_there_for_a_while_can_be_lost() -> None:
    """A Python process forks for a moment whenever it starts a program, and its fork has its name."""
    own, name = os.getpid(), Path("/proc/self/comm").read_text().strip()
    child = Member(state="S", parent=7)
    family = Family(7, name)
    assert family.lost({own: child}) == set()
    assert family.lost({}) == set()
    for members in ({own: replace(child, parent=8)},) * 3:
        assert family.lost(members) == set()
    assert family.lost({}) == set()
    for _ in range(2):
        assert family.lost({own: child}) == set()
    assert family.lost({own: replace(child, state="Z")}) == {own}


def _stack(supervisor: Supervisor) -> Stack:
    return stack_in(supervisor.home, int(supervisor.pid_file.read_text()))


def _child(home: Path, leader: int) -> int:
    until(lambda: len(group_members(home, leader)) == 2)
    (found,) = set(group_members(home, leader)) - {leader}
    return found
