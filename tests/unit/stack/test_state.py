from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from serin.errors import NotUp, StackError
from serin.stack.state import Stack, changing_stack, read_stack, running_stack, stack_file, write_stack
from serin.stack.survivors import STACK_MARK, end_processes, stack_processes, start_ticks


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
def test_a_file_that_cannot_be_understood_is_no_stack(tmp_path: Path, content: str) -> None:
    stack_file(tmp_path).write_text(content)
    assert read_stack(tmp_path) is None


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
        assert child.wait(timeout=1) == -signal.SIGTERM
        assert bystander.poll() is None
    finally:
        for process in (child, bystander):
            process.kill()
            process.wait()


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    child = subprocess.Popen(
        ["sh", "-c", 'trap "" TERM; echo ready; while :; do sleep 1; done'], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    end_processes([child.pid], grace_s=0.1)
    assert child.wait(timeout=1) == -signal.SIGKILL
    child.stdout.close()
