"""The processes of a training, by the kind of model, and how one is followed to its end: its progress is passed on, and
it is stopped on request. Does not import torch."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from serin.errors import TrainingRefused
from serin.machine import environment
from serin.machine.log_times import log_at
from serin.store.waits import Wait, between
from serin.training.launch.job import TrainingJob, status_file
from serin.training.launch.machines import Machines
from serin.training.launch.progress import Follower, describe

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SAVES_IN_S = 45.0  # after SIGTERM; torchrun itself gives its workers 30
Command = list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """A training on this host. `name`: the run's, the same on all hosts. `folder`: of the run on this host. `hear` gets
    the records of the workers' progress, `began` the id of each process. `waits` gets what each process waits for."""

    job: TrainingJob
    name: str
    folder: Path
    devices: tuple[str, ...]
    machines: Machines
    stop: threading.Event
    hear: Callable[[dict[str, Any]], None]
    began: Callable[[int], None] = lambda _: None
    waits: list[Wait] = field(default_factory=list)


def run_process(
    command: Command, settings: dict[str, str], output: BinaryIO, work: HostWork
) -> tuple[int, bool]:
    """Returns the process's exit code, and whether it was asked to stop. One that was and does not end in time is
    killed: what it saved before is kept."""
    follower, moments = Follower(work.folder), {"asked": time.time()}
    kill_at: float | None = None

    def hear(record: dict[str, Any]) -> None:
        moments.setdefault(record["event"], record["t"])
        work.hear(record)

    process = start_process(command, environment.child_environment(**settings), output)
    work.began(process.pid)
    try:
        with sigterm_sets(work.stop):
            while not has_ended(process, _POLL_S):
                pass_on(follower, hear)
                if work.stop.is_set() and kill_at is None:
                    kill_at = time.monotonic() + _SAVES_IN_S
                    process.terminate()  # a worker saves; torchrun passes the signal on to its workers
                elif kill_at is not None and time.monotonic() > kill_at:
                    logger.warning(f"killed: it did not save and end within {_SAVES_IN_S:g} s of SIGTERM")
                    process.kill()
    finally:
        _end_now(process)
    work.waits.extend(_end_wait(work.folder))
    pass_on(follower, hear)
    work.waits.extend(_start_waits(moments))
    return process.returncode, kill_at is not None


def _end_wait(folder: Path) -> list[Wait]:
    """How long a training process has taken to end, since it recorded how."""
    try:
        recorded = status_file(folder).stat().st_mtime
    except OSError:
        return []
    return between(("", recorded), ("end of the training process", time.time()))


def _start_waits(moments: Mapping[str, float]) -> list[Wait]:
    """What a training waits for before its first step, by the moments at which it has reported."""
    return between(
        ("", moments["asked"]),
        ("start of the training process, with imports", moments.get("imported")),
        ("device, rows and settings of the first training step", moments.get("started")),
    )


def start_process(command: Command, variables: dict[str, str], output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=True,  # this process handles Ctrl-C at the terminal, not the workers
    )


@contextmanager
def sigterm_sets(stop: threading.Event) -> Iterator[None]:
    """Makes SIGTERM set `stop`: save and stop. Only a main thread can install the handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda _signal, _frame: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def has_ended(agent: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Waits for at most `wait_s`."""
    try:
        agent.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end_now(agent: subprocess.Popen[bytes]) -> None:
    """Kills the agent if it still runs. The workers die with it, because they watch it."""
    if agent.poll() is None:
        agent.terminate()
        if not has_ended(agent, _SAVES_IN_S):
            agent.kill()
            agent.wait()


def pass_on(follower: Follower, hear: Callable[[dict[str, Any]], None]) -> None:
    """Hands over what the workers have reported since the last call, and logs it."""
    for record in follower.read():
        hear(record)
        line = describe(record)
        if line:
            log_at(logger, line, record["t"])


def programs(job: TrainingJob, folder: Path, machines: Machines) -> list[Command]:
    """Returns the commands. Each starts when the one before succeeded. All die with this process."""
    place, parent = str(folder), str(os.getpid())
    # A single process needs no torchrun, which would import torch a second time.
    alone = job.processes == machines.count == 1
    torchrun = torchrun_program(folder, job.processes, machines.torchrun_options(job.digest))
    take_over = _module("foreign.take_over", place, parent)
    match job.model.kind:
        case "xgboost":
            if job.processes > 1 and not job.gpu:
                reason = "XGBoost uses all cores in one process; remove training.processes, or set it to 1"
                raise TrainingRefused(folder=folder, reason=reason)
            return [_module("programs.trees", place, parent)]
        case "auto":
            return [_module("programs.auto", place, parent)]
        case "script":
            assert job.model.script is not None
            if not Path(job.model.script).is_file():
                reason = f"model.script: no file {job.model.script}; the path is relative to the spec's file"
                raise TrainingRefused(folder=folder, reason=reason)
            return [
                _module("foreign.script_rank", parent, job.model.script) if alone else torchrun,
                take_over,
            ]
        case "onnx":
            return [take_over]
        case _:
            return [_module("programs.worker", place, parent) if alone else torchrun]


def torchrun_program(folder: Path, ranks: int, options: list[str]) -> Command:
    """Returns the command for the ranks of this machine; `options`: torchrun's, about the other machines."""
    return _module("programs.agent", str(folder), str(ranks), str(os.getpid()), *options)


def pruning_program(folder: Path) -> Command:
    return _module("programs.pruning", str(folder), str(os.getpid()))


def _module(name: str, *arguments: str) -> Command:
    return [sys.executable, "-m", f"serin.training.{name}", *arguments]
