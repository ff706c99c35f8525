"""progress.jsonl: the workers' progress, one JSON record per line; launch follows it. Does not import torch."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def progress_file(folder: Path) -> Path:
    return folder / "progress.jsonl"


def tell(folder: Path, event: str, **facts: Any) -> None:
    """Appends one line in one write: readers never see a partial one, and kill -9 does not lose it."""
    line = json.dumps({"t": round(time.time(), 3), "event": event, **facts}) + "\n"
    file = os.open(progress_file(folder), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


class Follower:
    """Reads lines that are appended after it was created."""

    def __init__(self, folder: Path) -> None:
        self._path = progress_file(folder)
        self._path.touch()
        self._offset = self._path.stat().st_size

    def read(self) -> list[dict[str, Any]]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


def describe(record: dict[str, Any]) -> str | None:
    """Returns the line for people, or None for a record that only programs need."""
    match record["event"]:
        case "started":
            ranks = f"{record['ranks']} process{'es' if record['ranks'] > 1 else ''}"
            at = f", resumed at step {record['step']:,}" if record["step"] else ""
            return (
                f"training on {record['device']}: {ranks}, {record['rows']:,} rows, {record['batch_rows']:,} per step, "
                f"{record['precision']}{at}"
            )
        case "step":
            return (
                f"epoch {record['epoch']}/{record['epochs']}, step {record['step']:,}/{record['steps']:,}, "
                f"loss {record['loss']:.4f}, {record['rows_per_s']:,.0f} rows/s{_left(record.get('left_s'))}"
            )
        case "epoch":
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in record["metrics"].items())
            best = " (best so far)" if record["best"] else ""
            return f"epoch {record['epoch']}/{record['epochs']} done: {metrics}{best}"
        case "note":
            return str(record["text"])
        case _:
            return None


def _left(seconds: float | None) -> str:
    """Formats the remaining time at the present rate, without evaluations and checkpoints."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f", {seconds:.0f} s left"
    return f", {seconds / 60:.0f} min left" if seconds < 5400 else f", {seconds / 3600:.1f} h left"
