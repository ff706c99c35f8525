"""Handles a step that does not fit into memory: the same rows in smaller parts. The batch and the result stay the same.

A single process continues by itself. With several, the others wait inside a step for one that cannot continue: the new
setting is stored, all exit, and the launcher restarts them from the last checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from serin.machine.durable import write_whole


class StartAgain(Exception):
    """Raised to restart all ranks; the changed settings are already in the run's folder."""


def smaller_parts(parts: int, rows: int) -> int | None:
    """Returns into how many parts `rows` are split next; None when they cannot be. Pure."""
    twice = 2 * parts
    return twice if rows % twice == 0 else None


def limit_batch(folder: Path, batch_rows: int) -> None:
    """Stores for the next measurement that so many rows did not fit."""
    write_whole(_limit_file(folder), f"{batch_rows}\n")


def batch_limit(folder: Path) -> int | None:
    try:
        return int(_limit_file(folder).read_text())
    except FileNotFoundError:
        return None


def _limit_file(folder: Path) -> Path:
    return folder / "batch_limit"
