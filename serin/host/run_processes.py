"""The processes of flow runs: which process runs which run, and which processes it has started.

A process that was forked for its run (deployments/workers) has the environment of the process that forked it, without
the run's id. It records its pid in <home>/stack/runs before it does anything else, so that a run always has a known
process. Processes that it starts then inherit the id.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serin.host.exec_wrapper import environment_of
from serin.host.process_scan import stack_processes
from serin.machine.process import start_ticks

RUN_MARK = "PREFECT__FLOW_RUN_ID"  # Prefect's name


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


def _variable(pid: int, name: str) -> str | None:
    values = [word for word in environment_of(pid) if word.startswith(f"{name}=".encode())]
    return values[0].decode(errors="replace").partition("=")[2] if values else None
