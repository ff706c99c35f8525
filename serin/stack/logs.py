"""What the parts of the stack wrote into their logs."""

from __future__ import annotations

from pathlib import Path


def log_tail(path: Path, lines: int = 20) -> str:
    """The last lines; '' when there is no log."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def log_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def log_says(path: Path, offset: int, words: str) -> bool:
    """Whether `words` stand in what was written after `offset`; a log that was rotated meanwhile is read whole."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return words.encode() in (content[offset:] if len(content) >= offset else content)
