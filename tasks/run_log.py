"""The log of a run: what Serin logs while a task works, and warnings of Dask, thinned out.

Prefect stores every line in its database: of lines that differ only in their numbers (steps of a training, parts of a
table) a few are enough. Dropped lines are not lost: the stages write them to files.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from prefect import get_run_logger

from serin.pipeline.follow_files import PROCESSES
from serin.pipeline.roll_out import DECISIONS

Say = Callable[[str], None]

_NUMBERS = re.compile(r"[\d.,]+")
_EVERY_S = 10.0
_LONGEST = 2000  # characters of one line
_current: ContextVar[object | None] = ContextVar("serin_run_log", default=None)


class Thinned:
    """Passes on the first line of each shape, then one of that shape every `every_s`, and its last one."""

    def __init__(
        self, say: Say, *, every_s: float = _EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._clock = clock
        self._told: dict[str, float] = {}
        self._held: dict[str, str] = {}
        self._lock = threading.Lock()  # several threads of a stage may log

    def __call__(self, line: str) -> None:
        with self._lock:
            shape, now = _NUMBERS.sub("#", line), self._clock()
            if now - self._told.get(shape, -self._every_s) < self._every_s:
                self._held[shape] = line
                return
            self._told[shape] = now
            self._held.pop(shape, None)
            self._say(line)

    def flush(self) -> None:
        """Passes on the last line of each shape, in the order they came."""
        with self._lock:
            for line in self._held.values():
                self._say(line)
            self._held.clear()


@contextmanager
def thinned(say: Say) -> Iterator[Say]:
    less = Thinned(say)
    try:
        yield less
    finally:
        less.flush()


@contextmanager
def run_log() -> Iterator[None]:
    """Makes what Serin logs in this block, also in threads that it starts, lines of the current run."""
    logger = get_run_logger()
    with passing(logger.info, logger.warning):
        yield


@contextmanager
def passing(info: Say, warn: Say) -> Iterator[None]:
    """Passes on the lines of Serin and of its processes, thinned out, with its warnings and those of Dask."""
    with thinned(info) as less, _installed(_Passing(less, info, warn)):
        yield


@contextmanager
def _installed(handler: logging.Handler) -> Iterator[None]:
    serin, dask = logging.getLogger("serin"), logging.getLogger("distributed")
    serin.setLevel(logging.INFO)
    logging.getLogger(PROCESSES).setLevel(logging.DEBUG)
    token = _current.set(handler)
    serin.addHandler(handler)
    dask.addHandler(handler)
    try:
        yield
    finally:
        dask.removeHandler(handler)
        serin.removeHandler(handler)
        _current.reset(token)


class _Passing(logging.Handler):
    """Takes the records of the context it was installed in.

    A thread that a stage has started has no context to recognise it by: its records are taken, too.
    """

    def __init__(self, less: Say, info: Say, warn: Say) -> None:
        super().__init__()
        self._less, self._info, self._warn = less, info, warn

    def emit(self, record: logging.LogRecord) -> None:
        if _current.get() not in (None, self):
            return
        line, warning = record.getMessage(), record.levelno >= logging.WARNING
        if record.name.partition(".")[0] == "distributed":
            if not warning:
                return
            worker = getattr(record, "worker", None)  # forwarded from another process
            line = f"{f'dask worker {worker}' if worker else 'dask'}: {line}"
        say = self._warn if warning else self._info if record.name == DECISIONS else self._less
        say(line[:_LONGEST])
