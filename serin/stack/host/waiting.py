"""Waits until a process of the stack is ready, as long as it lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from serin.errors import ProcessFailed
from serin.machine.process import Process
from serin.stack.host.logs import log_tail
from serin.stack.host.supervisor import Supervisor

READY_S = 600.0  # seconds of work; minutes on a busy machine. A process that ends is noticed at once
_LOOK_S = 0.05


def wait_until_ready(supervisor: Supervisor, process: Process, ready: Callable[[], bool]) -> None:
    """Waits until `ready` is true; raises ProcessFailed with the end of the log, at once when the process has died."""

    def ended() -> str | None:
        child = supervisor.child(process.name)
        if child is None or child.state == "failed":
            return f"it ended ({'gone' if child is None else child.detail.lower()})"
        return None

    wait_while_alive(process.name, process.log, ready, ended)


def wait_while_alive(
    name: str, log: Path, ready: Callable[[], bool], ended: Callable[[], str | None]
) -> None:
    """`wait_until_ready` for any process. `ended`: how it has died, None while it lives."""
    deadline = time.monotonic() + READY_S
    while not ready():
        reason = ended()
        if reason is None and time.monotonic() > deadline:
            reason = f"not ready within {READY_S:.0f} s"
        if reason is not None:
            raise ProcessFailed(name=name, reason=reason, log=log, tail=log_tail(log))
        time.sleep(_LOOK_S)
