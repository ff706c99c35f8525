"""Becomes the user's script and dies with its parent: `python -m serin.training.foreign.script_rank PARENT_PID SCRIPT`.

The parent-death signal (die_with_parent) survives exec; signals and the exit code are then the script's own.
"""

from __future__ import annotations

import os
import sys

from serin.machine.parent_death import die_with_parent


def main() -> None:
    parent, script = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    os.execv(sys.executable, [sys.executable, script])


if __name__ == "__main__":
    main()
