"""The audit log: one line for each act that a person, a key or a run asked for on this machine, also for refused ones.

    <home>/audit.jsonl    readable by its owner only; nothing shortens it

What a controller decides by itself is in the journals of rollouts.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_LONGEST: Final = 500  # characters of a value


def write_act(
    home: Path,
    *,
    who: str,
    act: str,
    about: str = "",
    outcome: str = "done",
    why: str = "",
    subject: str = "",
) -> None:
    """Appends a line. `about`: the model, MODEL:VERSION or whatever else the act is on; `subject`: what a provider
    calls the person. An act does not fail because its line cannot be written: then the process's log has it. Where
    there is no home, nothing is written."""
    if not home.is_dir():
        return
    given = {"who": who, "subject": subject, "act": act, "about": about, "outcome": outcome, "why": why}
    line = {
        "t": round(time.time(), 3),
        **{name: one_line(text[:_LONGEST]) for name, text in given.items() if text},
    }
    text = json.dumps(line)
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(audit_file(home), flags, 0o600)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        log.warning("the audit log cannot be written (%s): %s", error.strerror, text)


def one_line(text: str) -> str:
    """Replaces what is not printable: a value that somebody sent must not begin another line of a log."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def audit_file(home: Path) -> Path:
    return home / "audit.jsonl"
