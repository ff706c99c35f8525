"""Reads the logs of the stack's processes, and keeps secrets out of them."""

from __future__ import annotations

import logging
from pathlib import Path

from serin.machine import environment

_MASK = "********"


def log_tail(path: Path) -> str:
    """Returns the last lines of a log; '' when there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-20:])
    except OSError:
        return ""


def log_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def log_says(path: Path, offset: int, words: str) -> bool:
    """Returns whether `words` occur in what was written after `offset`; a log that was rotated is read whole."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return words.encode() in (content[offset:] if len(content) >= offset else content)


def masked(text: str, secrets: frozenset[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, _MASK)
    return text


def mask_secrets() -> None:
    """Masks the secrets of this process's environment in all later log records. A pull step of every deployment.

    The record itself is masked, not a handler's output: every handler of every library sees the masked one.
    """
    hidden = environment.secrets()
    make, formatter = logging.getLogRecordFactory(), logging.Formatter()
    if not hidden or getattr(make, "masks_secrets", False):
        return

    def make_masked(*arguments: object, **named: object) -> logging.LogRecord:
        record: logging.LogRecord = make(*arguments, **named)
        said = record.getMessage()
        shown = masked(said, hidden)
        if shown != said:
            record.msg, record.args = shown, ()
        if record.exc_info:
            record.exc_text = masked(formatter.formatException(record.exc_info), hidden)
        return record

    make_masked.masks_secrets = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_masked)
