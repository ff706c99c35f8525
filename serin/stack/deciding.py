"""Finds the controller that a command is for, and refuses clearly when there is none."""

from __future__ import annotations

from pathlib import Path

from serin.pipeline.rollouts import find_rollouts
from serin.rollout.run.access import HomeRollouts, Rollouts
from serin.stack.host.state import running_stack


def deciding_rollouts(home: Path) -> Rollouts:
    """Returns the rollouts of a stack that is up, or of the hosts that share the store. Raises NotUp without either."""
    found = find_rollouts(home)
    return HomeRollouts(running_stack(home).home) if isinstance(found, HomeRollouts) else found
