"""Waits until a process of the stack is ready, as long as it lives."""

from __future__ import annotations

import time
from collections.abc import Callable

from serin.errors import ProcessFailed
from serin.machine.process import Process
from serin.stack.host.logs import log_tail
from serin.stack.host.supervisor import Supervisor

READY_S = 600.0  # seconds of work; minutes on a busy machine. A process that ends is noticed at once
_LOOK_S = 0.05


def wait_until_ready(supervisor: Supervisor, process: Process, ready: Callable[[], bool]) -> None:
    """Waits until `ready` is true; raises ProcessFailed with the end of the log, at once when the process has died."""
    deadline = time.monotonic() + READY_S
    while not ready():
        child = supervisor.child(process.name)
        if child is None or child.state == "failed":
            reason = f"it ended ({'gone' if child is None else child.detail.lower()})"
        elif time.monotonic() > deadline:
            reason = f"not ready within {READY_S:.0f} s"
        else:
            time.sleep(_LOOK_S)
            continue
        raise ProcessFailed(name=process.name, reason=reason, log=process.log, tail=log_tail(process.log))
