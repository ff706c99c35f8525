"""Steps that change records on disk, in a process that is killed before one of its changes. Loaded without pytest,
because a test starts many such processes."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from serin.monitoring.capture.forget import forget
from serin.monitoring.capture.merge import merge_parts, tidy
from serin.monitoring.capture.retention import HomeHours
from tests.unit.monitoring.capture.worker import NOON, recorder

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def record(home: Path) -> None:
    recorder(home, batch_bytes=1500).record(NOON)


def merge(home: Path) -> None:
    tidy(home, "taxis")
    merge_parts(home, "taxis", NOON + 86400)


def forget_some(home: Path) -> None:
    forget(HomeHours(home, "taxis"), "age >= 3000 and age < 5000")


STEPS: dict[str, Callable[[Path], None]] = {"record": record, "merge": merge, "forget": forget_some}


def die_at(step: str, home: str, change: int) -> None:
    """Does a step and is killed before its `change`-th change to the disk."""
    left = change

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if event in CHANGES or writes:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    STEPS[step](Path(home))
