"""The golden rows that a release was checked with, `<releases>/<release>/checked.json`: no client's predictions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serin.machine.durable import write_whole
from serin.machine.typed_json import Document

FILE = "checked.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """As Triton counts them: `rows` in `requests`."""

    rows: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept(Document):
    process: int
    checked: CheckedRows


def read_checked(folder: Path, process: int | None) -> CheckedRows:
    """Returns those of all checks of the process; none of a process that was not checked."""
    try:
        kept = _Kept.load((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return CheckedRows()
    return kept.checked if kept.process == process else CheckedRows()


def add_checked(folder: Path, process: int | None, more: CheckedRows) -> None:
    """Adds a check of the process to those before. Nothing for a release that was stopped in the meantime."""
    if process is None or not folder.is_dir():
        return
    before = read_checked(folder, process)
    checked = CheckedRows(rows=before.rows + more.rows, requests=before.requests + more.requests)
    write_whole(folder / FILE, _Kept(process=process, checked=checked).dump())
