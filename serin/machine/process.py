"""Describes long-running processes and the port through which something keeps them alive. Starts none itself."""

from __future__ import annotations

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
