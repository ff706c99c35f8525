"""Identifies a process by its pid and start, and tells whether a home's stack has its own rollout controller."""

from __future__ import annotations

import json
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Returns the start of `pid` in clock ticks since boot: with the pid it identifies one process. None: it has
    ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def stack_decides(home: Path) -> bool:
    """Returns whether the stack of `home` is up and decides about rollouts itself: an agent's does not."""
    try:
        stack = json.loads((home / "stack.json").read_text())
        pid, ticks, agent = stack["supervisor_pid"], stack["supervisor_ticks"], stack.get("agent", False)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return (home / "rollouts").is_dir()  # a damaged file: `read_stack` names it
    return not agent and start_ticks(pid) == ticks
