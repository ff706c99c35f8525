"""The log of a run: what Serin logs while a task works, and warnings of Dask, thinned out.

Prefect stores every line in its database: of lines that differ only in their numbers (steps of a training, parts of a
table) a few are enough. Dropped lines are not lost: the stages write them to files.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from prefect import get_run_logger
from prefect.runtime import flow_run

from serin.machine import environment
from serin.machine.log_times import log_at
from serin.pipeline.follow_files import PROCESSES
from serin.pipeline.roll_out import DECISIONS
from serin.prefect.run_summary import summary
from serin.store.artifacts import Release
from serin.store.run_waits import run_waits

Say = Callable[[str, float], None]  # a line, and when it was logged

_NUMBERS = re.compile(r"[\d.,]+")
_EVERY_S = 10.0
_LONGEST = 2000  # characters of one line
_current: ContextVar[object | None] = ContextVar("serin_run_log", default=None)


class Thinned:
    """Passes on the first line of each shape, then one of that shape every `every_s`, and its last one before any other
    line that is passed on: lines stay in their order."""

    def __init__(self, say: Say, *, every_s: float = _EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._told: dict[str, float] = {}
        self._held: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()  # several threads of a stage may log

    def __call__(self, line: str, created: float, *, say: Say | None = None) -> None:
        """`say`: passes on this line whatever its shape is."""
        with self._lock:
            shape = _NUMBERS.sub("#", line)
            self._held.pop(shape, None)
            if say is None and created - self._told.get(shape, -math.inf) < self._every_s:
                self._held[shape] = line, created
                return
            self._told[shape] = created
            self._pass_on_held()
            (say or self._say)(line, created)

    def flush(self) -> None:
        """Passes on the last line of each shape, in the order they came."""
        with self._lock:
            self._pass_on_held()

    def _pass_on_held(self) -> None:
        for line, created in self._held.values():
            self._say(line, created)
        self._held.clear()


@contextmanager
def run_log() -> Iterator[None]:
    """Makes what Serin logs in this block, also in threads that it starts, lines of the current run."""
    run = get_run_logger()
    logger, extra = (run.logger, run.extra) if isinstance(run, logging.LoggerAdapter) else (run, None)
    info, warn = (
        partial(log_at, logger, level=level, extra=extra) for level in (logging.INFO, logging.WARNING)
    )
    with passing(info, warn):
        yield


@contextmanager
def passing(info: Say, warn: Say) -> Iterator[None]:
    """Passes on the lines of Serin and of its processes, thinned out, with its warnings and those of Dask."""
    less = Thinned(info)
    try:
        with _installed(_Passing(less, info, warn)):
            yield
    finally:
        less.flush()


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

    def __init__(self, less: Thinned, info: Say, warn: Say) -> None:
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
        say = self._warn if warning else self._info if record.name == DECISIONS else None
        self._less(line[:_LONGEST], record.created, say=say)


def log_result(release: Release, *, served: bool) -> None:
    """Log what a pipeline has made, as its last lines. `served`: the version was rolled out and is live."""
    waits = run_waits(environment.home(), str(flow_run.id))
    if waits:
        get_run_logger().info("longest waits: %s", ", ".join(map(str, waits)))
    for line in summary(environment.home(), release, served=served):
        get_run_logger().info(line)
