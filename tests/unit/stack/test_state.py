from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import FileBroken, NotUp, StackError
from serin.machine.in_memory import remove_sockets, socket_folder
from serin.machine.process_identity import start_ticks
from serin.stack.host import exec_wrapper
from serin.stack.host.process_scan import STACK_MARK, end_processes, environment_of, stack_processes
from serin.stack.host.state import (
    Stack,
    changing_stack,
    read_stack,
    running_stack,
    stack_file,
    stack_name,
    write_stack,
)
from serin.stack.prefect import processes
from serin.stack.prefect.login import make_login, stack_api


def stack(home: Path, pid: int, ticks: int) -> Stack:
    return Stack(
        home=home,
        supervisor_pid=pid,
        supervisor_ticks=ticks,
        gateway_port=8080,
        prefect_api_url="http://127.0.0.1:4200/api",
        prefect_port=4200,
        since=time.time(),
    )


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    written = stack(tmp_path, os.getpid(), ticks)
    write_stack(written)
    assert read_stack(tmp_path) == written
    assert running_stack(tmp_path).gateway_url == "http://127.0.0.1:8080"


def test_a_pid_that_was_given_to_another_process_is_not_the_stack(tmp_path: Path) -> None:
    write_stack(stack(tmp_path, os.getpid(), 1))
    with pytest.raises(NotUp, match="start one with `serin up`"):
        running_stack(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "serin.stack", "version": 99}', "null"])
def test_an_unreadable_file_is_not_taken_for_a_stack_that_is_down(tmp_path: Path, content: str) -> None:
    stack_file(tmp_path).write_text(content)
    with pytest.raises(FileBroken, match=r"stack\.json.*`serin down` ends it"):
        read_stack(tmp_path)
    assert stack_file(tmp_path).read_text() == content


def test_the_file_carries_its_format_and_version(tmp_path: Path) -> None:
    write_stack(stack(tmp_path, 1, 1))
    content = json.loads(stack_file(tmp_path).read_text())
    assert (content["format"], content["version"]) == ("serin.stack", 1)


def test_a_second_change_of_the_same_stack_is_refused(tmp_path: Path) -> None:
    with (
        changing_stack(tmp_path),
        pytest.raises(StackError, match="another `serin up` or `serin down`"),
        changing_stack(tmp_path),
    ):
        pytest.fail("two at a time")


def test_a_process_is_found_by_its_mark_and_ended(tmp_path: Path) -> None:
    other = tmp_path / "other"
    marked = {**os.environ, STACK_MARK: str(tmp_path)}
    # A session of its own, as Prefect's flow runs have: no process group would find it.
    child = subprocess.Popen(["sleep", "600"], env=marked, start_new_session=True)
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, STACK_MARK: str(other)})
    try:
        assert stack_processes(tmp_path) == [child.pid]
        end_processes([child.pid], grace_s=5.0)
        assert child.wait(timeout=30) == -signal.SIGTERM
        assert bystander.poll() is None
    finally:
        for process in (child, bystander):
            process.kill()
            process.wait()


def test_a_process_is_known_from_its_first_moment(tmp_path: Path) -> None:
    # Popen returns in the middle of execve, where about one process in a hundred shows no environment yet.
    mark = f"{STACK_MARK}={tmp_path}".encode()
    for number in range(1000):
        with subprocess.Popen(["sleep", "600"], env={STACK_MARK: str(tmp_path)}) as child:
            try:
                if number % 2:
                    assert mark in environment_of(child.pid)
                else:
                    assert mark in exec_wrapper.environment_of(child.pid)
            finally:
                child.kill()


def test_what_shows_no_environment_for_good_is_not_waited_for() -> None:
    with subprocess.Popen(["sleep", "600"], env={}) as bare:
        try:
            assert environment_of(bare.pid) == [b""]
        finally:
            bare.kill()
    assert environment_of(2) in ([], [b""])  # of the kernel, or somebody else's


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    child = subprocess.Popen(
        ["sh", "-c", 'trap "" TERM; echo ready; while :; do sleep 1; done'], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    end_processes([child.pid], grace_s=0.1)
    assert child.wait(timeout=30) == -signal.SIGKILL
    child.stdout.close()


def test_a_stack_shows_its_own_server_its_login_and_another_what_the_caller_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "ada:lovelace")
    monkeypatch.setenv("PREFECT_API_KEY", "pnu_1")
    own = stack(tmp_path, 1, 1)
    login = make_login(tmp_path)
    assert (stack_api(own).login, stack_api(own).key) == (login, None)
    foreign = replace(own, prefect_port=None)
    assert (stack_api(foreign).login, stack_api(foreign).key) == ("ada:lovelace", "pnu_1")


def test_only_a_reconciler_for_another_s_server_is_given_the_caller_s_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "ada:lovelace")
    own = stack(tmp_path, 1, 1)
    foreign = replace(own, prefect_port=None, prefect_api_url="http://company.example/api")
    assert "PREFECT_API_AUTH_STRING" not in processes.reconciler(own).environment
    given = processes.reconciler(foreign).environment
    assert given["PREFECT_API_AUTH_STRING"] == "ada:lovelace"
    assert given["PREFECT_API_URL"] == "http://company.example/api"


def test_two_stacks_have_two_names_and_keep_them(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for home in (one, two):
        (home / "stack").mkdir(parents=True)
    assert stack_name(one) == stack_name(one) != stack_name(two)
    assert processes.workers_of(one) == (f"serin-cpu-{stack_name(one)}", f"serin-gpu-{stack_name(one)}")


@pytest.mark.parametrize("made_once", [stack_name, socket_folder])
def test_processes_that_start_together_agree(made_once: Callable[[Path], object], tmp_path: Path) -> None:
    homes = [tmp_path / str(number) for number in range(100)]
    together = threading.Barrier(4)

    def ask(home: Path) -> object:
        together.wait(30)
        return made_once(home)

    with ThreadPoolExecutor(4) as threads:
        for home in homes:
            assert len(set(threads.map(ask, [home] * 4))) == 1
    for home in homes if made_once is socket_folder else []:
        assert remove_sockets(home) == 0
