"""Which processes count as frozen, and that the supervisor replaces them; supervisord is real and starts in 0.2 s."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from serin.machine.environment import child_environment
from serin.machine.process import Leftovers, Process
from serin.stack.host.process_scan import STACK_MARK, end_processes, group_members, stack_processes
from serin.stack.host.state import remove_sockets
from serin.stack.host.supervisor import Supervisor
from serin.stack.host.watchdog import SILENT_S, Life, Look, after_look, beat_file, read_replaced
from tests.signals import hit
from tests.unit.stack.test_supervisor import sleeper, until

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


def running(supervisor: Supervisor, process: Process) -> int:
    supervisor.start(process)
    until(lambda: supervisor.state(process.name) == "running")
    pid = supervisor.pid(process.name)
    assert pid is not None
    return pid


def python(supervisor: Supervisor, script: str) -> Process:
    return replace(sleeper(supervisor), command=(sys.executable, "-c", script))


def is_replaced(supervisor: Supervisor, pid: int, reason: str) -> None:
    until(lambda: supervisor.pid("sleeper") not in (pid, None))
    (found,) = read_replaced(supervisor.home)
    assert (found.name, found.pid) == ("sleeper", pid)
    assert reason in found.reason
    assert f"sleeper (process {pid}) is frozen" in supervisor.log.read_text()


def test_a_stopped_process_is_replaced_and_recorded(supervisor: Supervisor) -> None:
    pid = running(supervisor, sleeper(supervisor))
    hit(pid, signal.SIGSTOP)
    is_replaced(supervisor, pid, "SIGSTOP")


def test_a_stopped_child_of_a_process_that_owns_its_group_is_replaced_with_it(supervisor: Supervisor) -> None:
    """As Triton's Python processes; a flow that a worker has started is its own matter."""
    process = replace(sleeper(supervisor, "sleep 600 & wait"), leaves=Leftovers(shared_memory="no-such-"))
    pid = running(supervisor, process)
    until(lambda: len(group_members(supervisor.home, pid)) == 2)
    (child,) = set(group_members(supervisor.home, pid)) - {pid}
    hit(child, signal.SIGSTOP)
    is_replaced(supervisor, pid, "SIGSTOP")


BEATS_ONCE = """if True:
    import threading
    from pathlib import Path
    from serin.machine import environment
    from serin.stack.host.standing import begin_beats
    begin_beats(Path({home!r}))
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


def test_a_main_loop_that_hangs_is_replaced(supervisor: Supervisor) -> None:
    pid = running(supervisor, python(supervisor, BEATS_ONCE.format(home=str(supervisor.home))))
    until(lambda: beat_file(supervisor.home, pid).exists())
    is_replaced(supervisor, pid, "no sign of life")


@contextmanager
def server(path: Path) -> Iterator[threading.Event]:
    """Answers requests on a unix socket until the event is set; then it still accepts them."""
    silent = threading.Event()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.recv(1000)
            if not silent.is_set():
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                connection.close()

    threading.Thread(target=answer, daemon=True).start()
    try:
        yield silent
    finally:
        listener.close()


def test_a_server_that_accepts_requests_and_answers_none_is_replaced(supervisor: Supervisor) -> None:
    place = supervisor.socket.with_name("asked.sock")
    with server(place) as silent:
        pid = running(supervisor, replace(sleeper(supervisor), asks=place))
        until(lambda: (supervisor.socket.parent / "beats").exists())
        threading.Event().wait(2.5)  # it is asked, and answers
        assert read_replaced(supervisor.home) == []
        silent.set()
        is_replaced(supervisor, pid, "no sign of life")
