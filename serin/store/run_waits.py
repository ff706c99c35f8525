"""The waits of an orchestrator's run, kept with the notes about its stages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from serin.machine.typed_json import json2value
from serin.store.receipt import Receipt
from serin.store.stage_keys import notes, notes_file
from serin.store.waits import Wait, longest


def note_waits(home: Path, run: str, waits: Iterable[Wait]) -> None:
    """Records waits around the stages of an orchestrator's run."""
    path = notes_file(home, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"waits": [wait.to_json() for wait in waits]}) + "\n")


def run_waits(home: Path, run: str) -> tuple[Wait, ...]:
    """The longest waits of a run: those around its stages, and those in the receipts of the stages that it ran."""
    found: list[Wait] = []
    with suppress(OSError):
        for line in notes_file(home, run).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError, AttributeError):  # cut short by a crash
                found += json2value(tuple[Wait, ...], json.loads(line).get("waits", ()))
    files = [home / entry["receipt"] for entry in notes(home, run) if entry["ran"] and entry.get("receipt")]
    receipts = [receipt for file in files if (receipt := Receipt.load_file(file))]
    return longest([*found, *(wait for receipt in receipts for wait in receipt.waits)])
