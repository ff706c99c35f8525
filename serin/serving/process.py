"""What serving needs of whoever keeps processes alive. It starts none itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

ProcessState = Literal["absent", "starting", "running", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leavings:
    """Its children, and regions of shared memory whose names begin so."""

    shared_memory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A long-running program: how to start it, where its output goes, how long it may take to end by itself.

    `settle_s`: one that ends sooner has not come up. A host tries again, each time after a longer pause; one that ends
    later is started again at once. `leaves`: what one that was killed leaves behind, and what has to go before it is
    started again.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    log: Path
    stop_s: float
    settle_s: float = 1.0
    leaves: Leavings | None = None


class ProcessHost(Protocol):
    """Keeps named processes running. `stop` returns when the process and its children are gone."""

    def start(self, process: Process) -> None: ...

    def stop(self, name: str) -> None: ...

    def state(self, name: str) -> ProcessState: ...

    def pid(self, name: str) -> int | None: ...
