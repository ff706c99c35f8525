"""Passes on the lines that other processes append to text files, each with its source, while a block runs."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from serin.machine.hardware import inventory

PROCESSES = "serin.pipeline.processes"
"""The logger of what ranks and Triton print, at DEBUG: too much for a terminal, worth keeping in a run's log."""
_LOOK_S = 0.5
_LONGEST = 2000  # characters of one line
_ABOUT_GPUS = re.compile(r"CudaDriverHelper|pinned system memory|DCGM|CUDA driver")


@contextmanager
def following(
    find: Callable[[], Iterable[Path]], say: Callable[[str], None], *, label: Callable[[str], str | None]
) -> Iterator[None]:
    """Whole lines that are appended to files while the block runs go to `say` as `label` gives them; None leaves a line
    out. Files may not exist yet."""
    offsets, over = {path: path.stat().st_size for path in find()}, threading.Event()

    def pass_on() -> None:
        for path in sorted(find()):
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            offsets[path] = offsets.get(path, 0) + len(whole) + len(newline)
            for line in whole.decode(errors="replace").splitlines():
                if line.strip() and (labelled := label(line[:_LONGEST])) is not None:
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


def process_lines(
    find: Callable[[], Iterable[Path]], *, label: Callable[[str], str | None]
) -> AbstractContextManager[None]:
    """`following` into the logger of other processes; nothing where nobody wants its lines."""
    logger = logging.getLogger(PROCESSES)
    if not logger.isEnabledFor(logging.DEBUG):
        return nullcontext()
    return following(find, lambda line: logger.debug("%s", line), label=label)


def rank_line(line: str) -> str:
    """torchrun names its ranks; one process alone is the first."""
    return line if line.startswith("rank ") else f"rank 0: {line}"


def triton_line(release: str) -> Callable[[str], str | None]:
    """Warnings, errors and what was loaded: the rest of Triton's log is a table of its settings. Where there is no GPU,
    Triton's complaints about that are left out, too."""
    without_gpu = not inventory()

    def label(line: str) -> str | None:
        worth = re.match(r"[WEF]\d{4} ", line) or "successfully loaded" in line or "Traceback" in line
        if not worth or (without_gpu and _ABOUT_GPUS.search(line)):
            return None
        return f"triton {release}: {line}"

    return label
