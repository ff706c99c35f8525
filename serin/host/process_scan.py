"""Finds and ends processes that belong to a stack, by a mark in their environment. Never by name.

Every process of a stack inherits STACK_MARK=<home>, also those that start their own sessions (Prefect's flow runs,
torchrun's workers, Triton's stubs), so that `serin down` finds all of them and a crash can be cleaned up later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from serin.host.exec_wrapper import PROCESS_MARK, environment_of, stat_of
from serin.machine.process import start_ticks

STACK_MARK = "SERIN_STACK"


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
    mark = f"{PROCESS_MARK}=".encode()
    return next((word for word in environment_of(pid) if word.startswith(mark)), mark)[len(mark) :].decode()


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
