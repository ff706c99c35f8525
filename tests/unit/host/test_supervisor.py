"""supervisord for real: it starts in 0.2 s."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import StackError
from serin.host import exec_wrapper
from serin.host import supervisor as supervisor_module
from serin.host.down import take_down
from serin.host.process_scan import STACK_MARK, end_processes, group_members, stack_processes
from serin.host.state import Stack, write_stack
from serin.host.supervisor import Supervisor
from serin.machine import parent_death
from serin.machine.environment import child_environment
from serin.machine.in_memory import remove_sockets
from serin.machine.process import Leftovers, Process, start_ticks
from tests.kit.waiting import until
from tests.signals import hit


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    home = tmp_path / "a home"
    home.mkdir()
    supervisor = Supervisor(home)
    pid = supervisor.launch(child_environment(**{STACK_MARK: str(home)}))
    yield supervisor
    end_processes([pid], grace_s=0.0)  # its children die with it
    end_processes(stack_processes(home), grace_s=0.0)
    remove_sockets(home)


def sleeper(supervisor: Supervisor, script: str = "exec sleep 600", *, stop_s: float = 2.0) -> Process:
    return Process(
        name="sleeper",
        command=("sh", "-c", script),
        environment=child_environment(WORDS="a\"b'c %d, e=f"),
        folder=supervisor.home,
        log=supervisor.logs / "sleeper.log",
        stop_s=stop_s,
    )


def test_a_process_gets_its_environment_to_the_letter(supervisor: Supervisor) -> None:
    supervisor.start(sleeper(supervisor, 'echo "$WORDS"; exec sleep 600'))
    log = supervisor.logs / "sleeper.log"
    until(lambda: log.exists() and log.read_text() == "a\"b'c %d, e=f\n")


def test_a_killed_process_comes_back(supervisor: Supervisor) -> None:
    supervisor.start(sleeper(supervisor))
    until(lambda: supervisor.state("sleeper") == "running")
    first = supervisor.pid("sleeper")
    assert first is not None
    hit(first)
    until(lambda: supervisor.pid("sleeper") not in (first, None))


def test_what_a_killed_process_leaves_is_gone_before_it_comes_back(supervisor: Supervisor) -> None:
    """Its children, although they mind no SIGTERM, and its shared memory; nobody else's."""
    prefix = f"serin-test-{os.getpid()}-"
    left, other = Path("/dev/shm") / f"{prefix}region", Path("/dev/shm") / f"other-{prefix}region"
    child = '(trap "" TERM; exec sleep 600) &'
    script = f"""
        {child}
        test -e {left} && echo "begun beside the last one" || echo alone
        : > {left}; wait"""
    process = replace(sleeper(supervisor, script), leaves=Leftovers(shared_memory=prefix))
    bystander = replace(
        sleeper(supervisor, f"{child} wait"), name="bystander", log=supervisor.logs / "bystander.log"
    )
    try:
        other.touch()
        for each in (process, bystander):
            supervisor.start(each)
        until(left.exists)
        until(lambda: len(stack_processes(supervisor.home)) == 5)  # each with its child
        before = set(stack_processes(supervisor.home))
        first = supervisor.pid("sleeper")
        assert first is not None
        family = set(group_members(supervisor.home, first))
        assert len(family) == 2
        hit(first)
        until(lambda: supervisor.pid("sleeper") not in (first, None))
        until(lambda: process.log.read_text().splitlines() == ["alone", "alone"])
        until(lambda: len(stack_processes(supervisor.home)) == 5)
        assert family.isdisjoint(stack_processes(supervisor.home))
        assert before - family <= set(stack_processes(supervisor.home))
        assert other.exists()
    finally:
        left.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def test_a_process_s_children_outlive_it_unless_they_are_said_to_be_left_behind(
    supervisor: Supervisor,
) -> None:
    """A flow goes on when the worker that started it is killed."""
    supervisor.start(sleeper(supervisor, "sleep 600 & wait"))
    until(lambda: len(stack_processes(supervisor.home)) == 3)
    first = supervisor.pid("sleeper")
    assert first is not None
    (child,) = set(group_members(supervisor.home, first)) - {first}
    hit(first)
    until(lambda: supervisor.pid("sleeper") not in (first, None))
    until(lambda: len(stack_processes(supervisor.home)) == 4)
    assert child in stack_processes(supervisor.home)


def test_a_death_ends_the_supervisor_s_wait_and_the_round_after_it_does_not_wait() -> None:
    script = """if True:
        import os, signal, subprocess
        from serin.host.supervisord import PromptPoller
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poller = PromptPoller(None)
        subprocess.Popen(["sleep", "0.2"])
        print(poller.poll(600), poller.poll(600), poller.poll(0.01), flush=True)
        poller.close()
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150)
    assert done.stdout.strip() == "([], []) ([], []) ([], [])", done.stderr


def test_a_process_that_ends_before_it_has_settled_waits_for_its_next_start(supervisor: Supervisor) -> None:
    young = replace(
        sleeper(supervisor, "sleep 1.3; exit 1"), settle_s=60.0
    )  # longer than the least time to settle
    supervisor.start(young)

    def waits() -> bool:
        child = supervisor.child("sleeper")
        return child is not None and child.detail == "BACKOFF"

    until(waits)
    assert supervisor.state("sleeper") == "failed"


def test_starting_what_runs_changes_nothing(supervisor: Supervisor) -> None:
    supervisor.start(sleeper(supervisor))
    pid = supervisor.pid("sleeper")
    supervisor.start(sleeper(supervisor))
    assert supervisor.pid("sleeper") == pid


def test_starting_it_with_another_command_replaces_it(supervisor: Supervisor) -> None:
    supervisor.start(sleeper(supervisor))
    before = supervisor.pid("sleeper")
    supervisor.start(sleeper(supervisor, "exec sleep 601"))
    after = supervisor.pid("sleeper")
    assert after not in (before, None)


def test_a_command_that_does_not_exist_fails_and_its_log_says_why(supervisor: Supervisor) -> None:
    missing = replace(sleeper(supervisor), command=("no-such-command",))
    supervisor.start(missing)
    until(lambda: supervisor.state("sleeper") == "failed")
    assert "cannot start no-such-command: No such file" in missing.log.read_text()


def test_stop_ends_a_process_that_refuses_and_the_children_it_leaves(supervisor: Supervisor) -> None:
    child = 'trap "" TERM; sleep 600'
    supervisor.start(sleeper(supervisor, f"trap 'exit 0' TERM; sh -c '{child}' & wait", stop_s=1.0))
    until(lambda: len(stack_processes(supervisor.home)) >= 3)
    supervisor.stop("sleeper")
    assert supervisor.state("sleeper") == "absent"
    assert len(stack_processes(supervisor.home)) == 1  # supervisord


def test_stop_ends_what_a_child_starts_in_its_last_moment(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = supervisor.home / "word"  # the folder it runs in
    os.mkfifo(word)
    child = 'trap "" TERM; read line < word; sleep 600'
    supervisor.start(sleeper(supervisor, f"trap 'exit 0' TERM; sh -c '{child}' & wait", stop_s=1.0))
    until(lambda: len(stack_processes(supervisor.home)) == 3)

    def too_late(pids: list[int], *, grace_s: float) -> None:
        if word.exists():
            word.write_text("now\n")
            word.unlink()
            until(lambda: len(stack_processes(supervisor.home)) > 1 + len(pids))
        end_processes(pids, grace_s=grace_s)

    monkeypatch.setattr(supervisor_module, "end_processes", too_late)
    supervisor.stop("sleeper")
    assert not word.exists()
    assert len(stack_processes(supervisor.home)) == 1  # supervisord


def test_children_die_with_a_supervisor_that_is_killed(supervisor: Supervisor) -> None:
    supervisor.start(sleeper(supervisor))
    until(lambda: supervisor.state("sleeper") == "running")
    child = supervisor.pid("sleeper")
    assert child is not None
    hit(int(supervisor.pid_file.read_text()))
    until(lambda: start_ticks(child) is None)


def test_only_the_owner_reaches_the_socket_and_reads_environments(supervisor: Supervisor) -> None:
    supervisor.start(sleeper(supervisor))
    description = supervisor.folder / "conf.d" / "sleeper.json"
    places = (supervisor.socket, supervisor.socket.parent, description)
    assert [stat.S_IMODE(place.stat().st_mode) for place in places] == [0o700, 0o700, 0o600]


def test_a_home_that_supervisord_cannot_spell_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "100%"
    home.mkdir()
    with pytest.raises(StackError, match="choose a SERIN_HOME without percent signs"):
        Supervisor(home).launch({"PATH": os.defpath})
    remove_sockets(home)


def test_the_wrapper_of_every_process_needs_nothing_but_the_standard_library() -> None:
    """It runs `python -I -S`, and the file that ties it to its parent with it."""
    for module in (exec_wrapper, parent_death):
        imported = {name for name, value in vars(module).items() if hasattr(value, "__spec__")}
        assert imported <= sys.stdlib_module_names


_LOGS_TO_A_FULL_DISK = """
import sys
from supervisor import loggers
from serin.host.supervisord import survive_full_disk

sys.stderr = open("/dev/full", "w", buffering=1)
survive_full_disk()
log = loggers.getLogger(loggers.LevelsByName.INFO)
loggers.handle_file(log, "/dev/full", "%(message)s\\n", rotating=True)
log.info("a line that no disk takes")
loggers.handle_file(log, sys.argv[1], "%(message)s\\n", rotating=True, maxbytes=1000, backups=1)
log.handlers[-1].stream.close()
log.info("a rotation that failed")
log.info("a line that is kept")
print(open(sys.argv[1]).read())
"""


def test_a_line_that_cannot_be_logged_does_not_end_the_supervisor(tmp_path: Path) -> None:
    """Everything that it supervises would end with it."""
    command = [sys.executable, "-c", _LOGS_TO_A_FULL_DISK, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "a line that is kept" in done.stdout, done.stderr


@pytest.mark.parametrize("loop", ["agent", "controller"])
def test_a_release_that_the_loop_removes_at_last_does_not_keep_the_stack_up(
    supervisor: Supervisor, loop: str
) -> None:
    """It was about to stop the release when it was asked to end."""
    begun = supervisor.home / "begun"
    code = f"""
import signal, sys, time
from pathlib import Path
from serin.host.state import Stack, write_stack
from serin.host.supervisor import Supervisor
def end(*_):
    Supervisor(Path({str(supervisor.home)!r})).stop("flights-v2")
    sys.exit()
signal.signal(signal.SIGTERM, end)
Path({str(begun)!r}).touch()
while True:
    time.sleep(60)
"""
    supervisor.start(replace(sleeper(supervisor), name="flights-v2"))
    process = replace(sleeper(supervisor, stop_s=30.0), name=loop, command=(sys.executable, "-c", code))
    supervisor.start(process)
    until(begun.exists)
    pid = int(supervisor.pid_file.read_text())
    write_stack(
        Stack(
            home=supervisor.home, supervisor_pid=pid, supervisor_ticks=start_ticks(pid) or 0, gateway_port=1
        )
    )
    take_down(supervisor.home)
    assert stack_processes(supervisor.home) == []
