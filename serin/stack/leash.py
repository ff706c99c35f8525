"""Run one command that dies with the supervisor: `python -I -S leash.py process.json`.

The supervisor starts every child through this file. It ties the child's life to the parent's (PR_SET_PDEATHSIG
survives exec), so that kill -9 of the supervisor leaves no orphan, then becomes the command. It runs before
everything else and without site-packages: it must import nothing but the standard library.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """From here on the kernel kills this process when `parent` ends, or it exits now if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:
        sys.exit(f"the supervisor ({parent}) is gone")


def main(arguments: list[str]) -> None:
    (description,) = arguments
    process = json.loads(Path(description).read_text())
    die_with_parent(int(Path(process["parent_pid_file"]).read_text()))
    command: list[str] = process["command"]
    try:
        os.execvpe(command[0], command, process["environment"])
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
