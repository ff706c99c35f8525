"""The folder of a stack in memory: its unix sockets, and small files that are written also when the disk is full."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from serin.errors import StackUnusable
from serin.machine.durable import write_whole
from serin.machine.environment import runtime_folder

_PROBLEMS: Final = "problems"
OBJECTS: Final = "objects"  # decisions and commands that no disk has yet; they outlive the stack
RINGS: Final = "rings"  # requests that are not recorded yet; they outlive the stack as well
VOLATILE: Final = "cluster"  # of the objects: what the only host is to run and reports ends with the stack
_KEPT: Final = (OBJECTS, RINGS)


def memory_folder(home: Path) -> Path | None:
    """Returns the folder; None where no stack was started since it was last taken down."""
    try:
        return (home / "stack" / "sockets").readlink()
    except OSError:
        return None


def socket_folder(home: Path) -> Path:
    """Returns the folder, and makes it if needed. A link in `home` records it: another shell may have another
    TMPDIR."""
    link = home / "stack" / "sockets"
    if (folder := memory_folder(home)) is None:
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another process was first, and may remove it again
            link.symlink_to(runtime_folder(home))
        folder = memory_folder(home) or runtime_folder(home)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise StackUnusable(problem=f"{folder} belongs to another user; remove {link} and try again")
    return folder


def write_problems(home: Path, process: str, problems: Mapping[str, str]) -> None:
    """Leaves what a process of the stack has problems with, by model or duty, where `serin status` reads it."""
    if memory := memory_folder(home):
        (memory / _PROBLEMS).mkdir(mode=0o700, exist_ok=True)
        write_whole(memory / _PROBLEMS / f"{process}.json", json.dumps(dict(problems)))


def read_problems(home: Path) -> dict[str, str]:
    """Returns the problems of all processes of the stack in `home`."""
    memory, found = memory_folder(home), dict[str, str]()
    for path in sorted((memory / _PROBLEMS).glob("[!.]*.json")) if memory else ():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found |= {str(name): str(problem) for name, problem in json.loads(path.read_bytes()).items()}
    return found


def remove_sockets(home: Path) -> int:
    """Removes the folder, unless decisions or requests wait in it; returns how many sockets were left in it."""
    folder = memory_folder(home)
    if folder is None:
        return 0
    shutil.rmtree(folder / OBJECTS / VOLATILE, ignore_errors=True)
    found = list(folder.iterdir()) if folder.is_dir() else []
    for path in found:
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.name not in _KEPT or not any(file.is_file() for file in path.rglob("*")):
            shutil.rmtree(path, ignore_errors=True)
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
    except OSError:  # not empty
        return sum(not path.is_dir() for path in found)
    (home / "stack" / "sockets").unlink()
    return sum(not path.is_dir() for path in found)
