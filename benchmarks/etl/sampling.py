"""Samples the stacks of all threads every few milliseconds, to show where a run spends its time."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

EVERY_S = 0.004
_ROOT = str(Path(__file__).resolve().parents[2])
_IDLE = ("wait", "_worker", "select", "accept", "get")


@contextmanager
def sampled(shown: int = 45) -> Iterator[None]:
    """Prints, after the block, the lines of Serin in which threads were found most often, with what they called
    there."""
    seen: Counter[str] = Counter()
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(EVERY_S):
            for thread, frame in sys._current_frames().items():  # noqa: SLF001
                if thread != threading.get_ident() and (place := _place(frame)):
                    seen[place] += 1

    watcher = threading.Thread(target=look, name="sampling", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    print("  seconds per thread, by Serin's line and what it called:")
    for place, count in seen.most_common(shown):
        print(f"  {count * EVERY_S:>7.3f}  {place}")


def _place(frame: FrameType | None) -> str | None:
    """Returns Serin's innermost line and the innermost function of all; None for a thread that waits for work."""
    assert frame is not None
    leaf = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
    idle = frame.f_code.co_name in _IDLE
    walk: FrameType | None = frame
    while walk is not None:
        file = walk.f_code.co_filename
        if file.startswith(_ROOT) and "site" not in file:
            own = f"{Path(file).relative_to(_ROOT)}:{walk.f_lineno} {walk.f_code.co_name}"
            return None if idle and "engine" in own else f"{own} > {leaf}"
        walk = walk.f_back
    return None
