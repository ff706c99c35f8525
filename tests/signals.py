"""Signals to processes that may have ended already."""

import os
import signal
from contextlib import suppress


def send(number: signal.Signals, *pids: int) -> set[int]:
    """Signals each process that has not ended; returns those that were reached."""
    reached = set()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            reached.add(pid)
    return reached


def kill_9(*pids: int) -> set[int]:
    return send(signal.SIGKILL, *pids)


def hit(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """For tests about what happens after the signal: it must reach the process."""
    assert send(number, pid), f"process {pid} ended before it could be sent {number.name}"


def send_group(number: signal.Signals, leader: int) -> bool:
    """Signals all that is left of the group that `leader` began; False when nothing is."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return False
    return True
