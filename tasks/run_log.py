"""What a stage's own processes say, in the log of the run: with the source before each line, and not too often.

Prefect keeps every line in its database: of lines that differ in their numbers alone (steps of a training, parts of a
table) one in a while is enough. What is held back is not lost: it stands in the files that the stages write.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from serin.errors import StageStopped

Say = Callable[[str], None]

_NUMBERS = re.compile(r"[\d.,]+")
_EVERY_S = 10.0
_LOOK_S = 0.5
_LONGEST = 2000  # characters of one line


class Thinned:
    """A `say` that passes on the first line of each shape, then one of that shape every `every_s`, and its last one."""

    def __init__(
        self, say: Say, *, every_s: float = _EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._clock = clock
        self._told: dict[str, float] = {}
        self._held: dict[str, str] = {}
        self._lock = threading.Lock()  # several threads of a stage may speak

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
        """The last line of each shape, in the order they came."""
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


def until_stopped(say: Say, stop: threading.Event, *, stage: str) -> Say:
    """A `say` that ends its stage by StageStopped at the first line after `stop` was set: a run that was cancelled must
    not publish what nobody waits for, and nobody can end a thread from outside."""

    def speak(line: str) -> None:
        if stop.is_set():
            raise StageStopped(stage=stage)
        say(line)

    return speak


class Followed:
    """Text files that grow, and may not be there yet: whole lines that were appended since it was made."""

    def __init__(self, find: Callable[[], Iterable[Path]]) -> None:
        self._find = find
        self._offsets = {path: path.stat().st_size for path in find()}

    def read(self) -> list[str]:
        lines = []
        for path in sorted(self._find()):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            lines += [line[:_LONGEST] for line in whole.decode(errors="replace").splitlines() if line.strip()]
        return lines


@contextmanager
def following(
    find: Callable[[], Iterable[Path]], say: Say, *, label: Callable[[str], str | None]
) -> Iterator[None]:
    """Lines that the files get meanwhile are said as `label` gives them; None: not worth saying."""
    files, over = Followed(find), threading.Event()

    def pass_on() -> None:
        for line in files.read():
            labelled = label(line)
            if labelled is not None:
                say(labelled)

    def follow() -> None:
        while not over.wait(_LOOK_S):
            pass_on()

    with ExitStack() as stack:
        thread = threading.Thread(target=follow, name="run-log", daemon=True)
        thread.start()
        stack.callback(pass_on)  # what came last, once nobody else reads
        stack.callback(thread.join)
        stack.callback(over.set)
        yield


def rank_line(line: str) -> str:
    """torchrun names its ranks; one process alone is the first."""
    return line if line.startswith("[rank ") else f"[rank 0] {line}"


def triton_line(release: str) -> Callable[[str], str | None]:
    """Warnings, errors and what was loaded: the rest of Triton's log is a table of its settings."""

    def label(line: str) -> str | None:
        worth = re.match(r"[WEF]\d{4} ", line) or "successfully loaded" in line or "Traceback" in line
        return f"[triton {release}] {line}" if worth else None

    return label


class _Passing(logging.Handler):
    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        worker = getattr(record, "worker", None)  # forwarded from another process
        source = f"dask worker {worker}" if worker else "dask"
        self._say(f"[{source}] {record.getMessage()}"[:_LONGEST])


@contextmanager
def dask_warnings(say: Say) -> Iterator[None]:
    """Warnings of Dask's scheduler and workers, while they work for this process."""
    logger, passing = logging.getLogger("distributed"), _Passing(say)
    logger.addHandler(passing)
    try:
        yield
    finally:
        logger.removeHandler(passing)
