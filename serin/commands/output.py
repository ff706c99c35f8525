"""The output of the command: results on stdout, progress on stderr, JSON on request."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]


def show(text: str = "") -> None:
    """Prints a line of the result."""
    sys.stdout.write(f"{text}\n")


def show_json(value: Any) -> None:
    show(json.dumps(value, indent=2, default=str))


def say(text: str) -> None:
    """Prints a line of progress."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_file(path: Path, text: str) -> None:
    """Writes a file that the user named; a usage error when that is not possible."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from error


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Prints columns as wide as their widest cell; `empty` instead of a table without rows."""
    if not rows:
        show(empty)
        return
    cells = [list(columns), *[["-" if cell is None else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        show("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_problems(problems: Mapping[str, str]) -> None:
    """Prints what could not be shown, and why, and ends the command with exit code 1 if there is any."""
    for name, problem in problems.items():
        say(f"PROBLEM {name}: {problem}")
    if problems:
        raise typer.Exit(1)


def counted(number: int, one: str, several: str = "") -> str:
    """A number and its noun: 1 row, 2,000 rows. `several`: a plural that is not made with s."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def confirm(question: str, *, yes: bool) -> None:
    """Asks a person on a terminal. Elsewhere `--yes` is needed: the exit code is 2 without it."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        say(f"serin: {question} There is no terminal to ask on: add --yes. Nothing was changed.")
        raise typer.Exit(2)
    typer.confirm(question, abort=True, err=True)


def when(seconds: float) -> str:
    """Returns a time in UTC, as the journals and reports have it."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
