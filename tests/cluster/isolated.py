"""Runs a command in namespaces that end with it: a network, process ids, mounts and a private /run.

Two runs never meet, and nothing is added to the machine's network. When the first process of a run ends, in whatever
way, the kernel ends all others and removes the namespaces. A run that was killed leaves its folder of temporary files
alone, which the next one removes.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_PREFIX = "sc-"  # short: the folders hold unix sockets
_YOUNG_S = 60.0  # a folder may be this old before its run has locked it
# The shell is the first process: it adopts and reaps what other processes leave.
_FIRST = (
    "mount -t proc proc /proc && mount -t tmpfs tmpfs /run && mkdir -p /run/netns /run/lock && ip link set lo up"
    ' || exit 97; "$@" & wait $!'
)


def run_isolated(command: Sequence[str | Path], variables: Mapping[str, str]) -> int:
    """Returns the command's exit code, once everything in its namespaces has ended."""
    unshare = ["unshare", "--net", "--pid", "--mount", "--propagation", "private", "--fork", "--kill-child"]
    whole = ["setpriv", "--pdeathsig", "KILL", *unshare, "sh", "-c", _FIRST, "sh", *map(str, command)]
    before = [
        (number, signal.signal(number, _exit)) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    ]
    process = subprocess.Popen(whole, env=dict(variables))
    try:
        return process.wait()
    finally:
        _kill_first(process)
        for number, handler in before:
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


def _kill_first(process: subprocess.Popen[bytes]) -> None:
    """unshare waits for its child, which ends after all others in its namespace."""
    while process.poll() is None:
        with suppress(OSError):
            found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in found:
                os.kill(int(child), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end. Those of killed runs are removed first."""
    remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    folder.chmod(0o755)  # pods have other users
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_left() -> list[Path]:
    """Removes the folders of runs that are gone."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_left(folder: Path) -> bool:
    file = folder / ".lock"
    if not file.exists():
        return time.time() - folder.stat().st_mtime > _YOUNG_S
    with file.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
