"""Processes of a training without the seconds in which Python loads torch: forked from one that has loaded it.

Each is a process of its own with the command's arguments, environment and log, is told to stop and killed like any
other, and ends with the same codes. What is left out is the start of an interpreter, which other tests show.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
from typing import BinaryIO

import pytest

from serin.training.launch import processes
from tests.unit.training.ranks import SLOW_TO_LOAD


class WarmProcess:
    """As much of subprocess.Popen as a launcher uses."""

    def __init__(self, command: list[str], environment: dict[str, str], log: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*SLOW_TO_LOAD])
        assert command[:2] == [sys.executable, "-m"]
        self._process = context.Process(
            target=_become, args=(command[2:], environment, log, os.getpid()), daemon=False
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers fork what they would start."""

    def start(command: list[str], environment: dict[str, str], output: BinaryIO) -> WarmProcess:
        return WarmProcess(command, environment, output.name)

    monkeypatch.setattr(processes, "start_process", start)


def _become(command: list[str], environment: dict[str, str], log: str, launcher: int) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    # Its parent is the process it was forked from, which ends with the tests.
    sys.argv = [str(os.getppid()) if word == str(launcher) else word for word in command]
    importlib.import_module(command[0]).main()
