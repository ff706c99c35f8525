"""Waits until a process of the stack is ready, as long as it lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from serin.errors import ProcessFailed
from serin.host.logs import log_tail
from serin.host.supervisor import Supervisor
from serin.machine.process import Process

READY_S = 600.0  # seconds of work; minutes on a busy machine. A process that ends is noticed at once
_LOOK_S = 0.05
_ALIVE_S = 0.5  # asking the supervisor costs it and us more than a look at a port or a log


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
    began = asked = time.monotonic()
    while not ready():
        reason, now = None, time.monotonic()
        if now - asked >= _ALIVE_S:
            reason, asked = ended(), now
        if reason is None and now > began + READY_S:
            reason = f"not ready within {READY_S:.0f} s"
        if reason is not None:
            raise ProcessFailed(name=name, reason=reason, log=log, tail=log_tail(log))
        time.sleep(_LOOK_S)
