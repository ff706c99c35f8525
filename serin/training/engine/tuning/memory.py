"""When a step does not fit: the same rows in smaller parts. The batch, and so what is learned, stays as it is.

One process goes on by itself. Where there are several, the others wait in the middle of a step for one that cannot go
on: what to do next is written down, all end, and the launcher starts them again from the last checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from serin.machine.durable import write_whole


class StartAgain(Exception):
    """All ranks are to begin again; what is different then lies in the run's folder already."""


def smaller_parts(parts: int, rows: int) -> int | None:
    """Into how many parts `rows` are cut next; None when they cannot be. Pure."""
    twice = 2 * parts
    return twice if rows % twice == 0 else None


def limit_batch(folder: Path, batch_rows: int) -> None:
    """For the next measurement: so many rows did not fit."""
    write_whole(_limit_file(folder), f"{batch_rows}\n")


def batch_limit(folder: Path) -> int | None:
    try:
        return int(_limit_file(folder).read_text())
    except FileNotFoundError:
        return None


def _limit_file(folder: Path) -> Path:
    return folder / "batch_limit"
