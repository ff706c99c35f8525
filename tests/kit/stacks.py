"""The record of a stack, for commands that look at it."""

import os
from pathlib import Path
from typing import Any

from serin.host.state import Stack, write_stack
from serin.machine.process import start_ticks


def stack_in(home: Path, pid: int | None = None, **fields: Any) -> Stack:
    """A stack that is up: its supervisor is this process, or the one of `pid`."""
    home.mkdir(parents=True, exist_ok=True)
    pid = os.getpid() if pid is None else pid
    ticks = start_ticks(pid) or 0
    stack = Stack(home=home, supervisor_pid=pid, supervisor_ticks=ticks, **{"gateway_port": 1, **fields})
    write_stack(stack)
    return stack
