"""Runs one command that dies with the supervisor: `python -I -S exec_wrapper.py process.json`.

The supervisor starts every child through this file. It ties the child's life to the parent's (PR_SET_PDEATHSIG survives
exec), so that kill -9 of the supervisor leaves no orphan. It removes leftovers of the last child of this name, where
the process declares some: Triton's Python processes may outlive a Triton that was killed, with their memory. Then it
becomes the command. It runs before everything else and without site-packages, so it must import only the standard
library.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

PROCESS_MARK = "SERIN_PROCESS"  # the name, in the environment of the process and its descendants

_PARENT_DEATH = Path(__file__).resolve().parents[1] / "machine" / "parent_death.py"
_END_S = 5.0
_EXEC_S = 1.0
_KERNEL_THREAD = 0x0020_0000  # PF_KTHREAD
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (not a scratch file)


def clear_away(note: Path, marks: set[bytes], shared_memory: str) -> None:
    """Ends the process group recorded in `note` and removes its shared memory, then records our own group.

    The group's number may have been reused in the meantime, hence the marks in the environment.
    """
    with contextlib.suppress(OSError, ValueError):
        group = int(note.read_text())
        deadline = time.monotonic() + _END_S
        while (left := _members(group, marks)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
    for region in _SHARED_MEMORY.iterdir():
        if region.name.startswith(shared_memory):
            region.unlink(missing_ok=True)
    note.touch(mode=0o600)  # like everything beside it
    note.write_text(f"{os.getpgrp()}\n")


def _members(group: int, marks: set[bytes]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if os.getpgid(int(entry.name)) == group and marks <= set(environment_of(int(entry.name))):
                found.append(int(entry.name))
    return found


def environment_of(pid: int) -> list[bytes]:
    """Returns the environment of `pid` as NAME=value; empty when it has ended or belongs to another user."""
    deadline = time.monotonic() + _EXEC_S
    while True:
        try:
            text = Path(f"/proc/{pid}/environ").read_bytes()
            if text or _has_no_environment(pid) or time.monotonic() > deadline:
                return text.split(b"\0")
        except OSError:
            return []


def stat_of(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third (the state) on. Raises OSError when it is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _has_no_environment(pid: int) -> bool:
    """Returns whether the process permanently has no environment: during execve it shows none for some microseconds."""
    fields = stat_of(pid)
    ended, of_the_kernel = fields[0] in ("Z", "X"), bool(int(fields[6]) & _KERNEL_THREAD)
    begin, end = int(fields[47]), int(fields[48])  # addresses in its memory; 0: not mapped yet
    return ended or of_the_kernel or begin == end != 0


def main(arguments: list[str]) -> None:
    (file,) = arguments
    process = json.loads(Path(file).read_text())
    parent_death = runpy.run_path(str(_PARENT_DEATH))
    parent_death["die_with_parent"](int(Path(process["parent_pid_file"]).read_text()))
    environment: dict[str, str] = process["environment"]
    if leaves := process["leaves"]:
        marks = {f"{key}={environment[key]}".encode() for key in leaves["marks"]}
        clear_away(Path(file).with_suffix(".group"), marks, leaves["shared_memory"])
    command: list[str] = process["command"]
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
