"""Waiting for what another process or thread does: not for ever, and not when it cannot happen any more."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def until(
    look: Callable[[], T],
    what: str = "",
    *,
    within_s: float = 120.0,
    every_s: float = 0.02,
    alive: Callable[[], bool] = lambda: True,
    said: Callable[[], object] = str,
) -> T:
    """Returns the first true value of `look`. Fails after `within_s`, and at once when it is not `alive` any more;
    what is `said` then is shown."""
    deadline = time.monotonic() + within_s
    while not (value := look()):
        assert alive(), f"{what or 'it'} cannot happen any more\n{said()}"
        assert time.monotonic() < deadline, f"{what or 'it'} did not happen within {within_s:g} s\n{said()}"
        time.sleep(every_s)
    return value


def running(*processes: subprocess.Popen[Any]) -> Callable[[], bool]:
    """Whether none of them has ended."""
    return lambda: all(process.poll() is None for process in processes)


def tail(log: Path, characters: int = 4000) -> Callable[[], str]:
    """The end of a log, when it is asked for."""
    return lambda: log.read_text(errors="replace")[-characters:] if log.exists() else ""


class Clock:
    """Moves when a test says so."""

    def __init__(self, t: float = 0.0) -> None:
        self.t = t

    def __call__(self) -> float:
        return self.t
