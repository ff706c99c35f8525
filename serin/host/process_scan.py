"""Finds and ends processes that belong to a stack, by a mark in their environment. Never by name.

Every process of a stack inherits STACK_MARK=<home>, also those that start their own sessions (Prefect's flow runs,
torchrun's workers, Triton's stubs), so that `serin down` finds all of them and a crash can be cleaned up later.

A process that was forked for a flow run (deployments/workers) has the environment of the process that forked it,
without the run's id. It records its pid in <home>/stack/runs before it does anything else, so that a run always has a
known process. Processes that it starts then inherit the id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from serin.host.exec_wrapper import PROCESS_MARK, environment_of, stat_of
from serin.machine.process import start_ticks

STACK_MARK = "SERIN_STACK"
RUN_MARK = "PREFECT__FLOW_RUN_ID"  # Prefect's name


def stack_processes(home: Path) -> list[int]:
    """Returns every live process with the mark of the stack in `home`, without this one and its ancestors."""
    mark = f"{STACK_MARK}={home}".encode()
    own = _ancestors()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        if mark in environment_of(int(entry.name)) and start_ticks(int(entry.name)) is not None:
            found.append(int(entry.name))
    return found


def group_members(home: Path, leader: int) -> list[int]:
    """Returns the stack's processes that remain of the process group that `leader` began."""
    found = []
    for pid in stack_processes(home):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def process_name(pid: int) -> str:
    """Returns the name under which the supervisor started this process or one of its ancestors; '' when it did not."""
    return _variable(pid, PROCESS_MARK)


def _variable(pid: int, name: str) -> str:
    """Returns a variable of a process's environment; '' when it has none of that name."""
    mark = f"{name}=".encode()
    entry = next((word for word in environment_of(pid) if word.startswith(mark)), mark)
    return entry[len(mark) :].decode(errors="replace")


def end_processes(pids: Iterable[int], *, grace_s: float) -> None:
    """Sends SIGTERM, waits up to `grace_s`, sends SIGKILL. Returns when all have ended. A pidfd prevents signals to a
    reused pid."""
    handles: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handles[pid] = os.pidfd_open(pid)
        _signal(handles.values(), signal.SIGTERM)
        if not _wait(handles, grace_s):
            _signal((handles[pid] for pid in handles if start_ticks(pid) is not None), signal.SIGKILL)
            _wait(handles, 10.0)
    finally:
        for handle in handles.values():
            os.close(handle)


def _signal(handles: Iterable[int], number: signal.Signals) -> None:
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


def _wait(handles: dict[int, int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(start_ticks(pid) is not None for pid in handles):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _ancestors() -> set[int]:
    """Returns this process and its ancestors."""
    pids = set()
    pid = os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        try:
            pid = int(stat_of(pid)[1])
        except OSError:
            break
    return pids


def process_began(pid: int) -> float | None:
    """Returns the start time of a process in seconds since 1970; None: it has ended."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    booted = next(
        line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
    )
    return int(booted) + ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcesses:
    """The live processes of one run: the one that runs its flow, if it lives, and those that it has started."""

    engines: tuple[int, ...]
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    run: str
    ticks: int  # the start of the process: a pid may be reused


def record_folder(home: Path) -> Path:
    return home / "stack" / "runs"


def record_run(home: Path, run: str, pid: int) -> None:
    """Records that process `pid`, which has its own session, runs the flow run with the id `run`."""
    ticks = start_ticks(pid)
    if ticks is None:  # it has ended
        return
    folder = record_folder(home)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    sessions = _sessions()
    for old in _records(home):
        if old not in sessions:
            (folder / str(old)).unlink(missing_ok=True)
    scratch = folder / f"{pid}.new"
    scratch.write_text(f"{run} {ticks}\n")
    scratch.replace(folder / str(pid))


def run_processes(home: Path) -> dict[str, RunProcesses]:
    """Returns the processes of every run of the stack in `home`, by the run's id."""
    records = _records(home)
    found: dict[str, tuple[list[int], list[int]]] = {}
    for pid in stack_processes(home):
        record = records.get(pid)
        if record is not None and record.ticks == start_ticks(pid):
            found.setdefault(record.run, ([], []))[0].append(pid)
        elif run := _variable(pid, RUN_MARK) or _forked_by(pid, records):
            found.setdefault(run, ([], []))[1].append(pid)
    return {
        run: RunProcesses(engines=tuple(engines), others=tuple(others))
        for run, (engines, others) in found.items()
    }


def _records(home: Path) -> dict[int, _Record]:
    """Returns the records by pid, also of processes that have ended."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in record_folder(home).iterdir():
            with contextlib.suppress(OSError, ValueError):  # being written or removed
                run, ticks = path.read_text().split()
                found[int(path.name)] = _Record(run=run, ticks=int(ticks))
    return found


def _forked_by(pid: int, records: Mapping[int, _Record]) -> str | None:
    """Returns the run of a forked child that has not started a program: it has the environment of the process
    from which its run was forked."""
    with contextlib.suppress(ProcessLookupError):
        leader = os.getsid(pid)
        record = records.get(leader)
        if record is not None and start_ticks(leader) in (None, record.ticks):
            return record.run
    return None


def _sessions() -> set[int]:
    """Returns the sessions that still have a process. A session has the pid of the process that began it."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                found.add(os.getsid(int(entry.name)))
    return found
