"""Describes long-running processes, how one is identified, and the port through which something keeps them alive."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

ProcessState = Literal["absent", "starting", "running", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What a killed process leaves: its children, and shared memory regions whose names begin with `shared_memory`.

    `children`: the name (/proc/PID/comm) of children without which it does not work, although it lives on.
    """

    shared_memory: str
    children: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A long-running program: how to start it, where its output goes, how long it may take to stop by itself.

    `settle_s`: a process that ends sooner has not come up, and its host tries again after longer and longer pauses. One
    that ends later is restarted at once. `leaves`: what must be removed before a killed process is started again.
    `asks`: a unix socket on which it answers GET /v2/health/live while it works; None: its main loop says so itself, or
    nothing does.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    log: Path
    stop_s: float
    settle_s: float = 1.0
    leaves: Leftovers | None = None
    asks: Path | None = None


class ProcessHost(Protocol):
    """Keeps named processes running. `stop` returns when the process and its children have ended."""

    def start(self, process: Process) -> None: ...

    def stop(self, name: str) -> None: ...

    def state(self, name: str) -> ProcessState: ...

    def pid(self, name: str) -> int | None: ...


def start_ticks(pid: int) -> int | None:
    """Returns the start of `pid` in clock ticks since boot: with the pid it identifies one process. None: it has
    ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def stack_decides(home: Path) -> bool:
    """Returns whether the stack of `home` is up and decides about rollouts itself: an agent's does not."""
    try:
        stack = json.loads((home / "stack.json").read_text())
        pid, ticks, agent = stack["supervisor_pid"], stack["supervisor_ticks"], stack.get("agent", False)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return (home / "rollouts").is_dir()  # a damaged file: `read_stack` names it
    return not agent and start_ticks(pid) == ticks
