"""Files that are locked while their writer lives, and name it. The kernel releases the lock when the writer dies."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from serin.machine import environment
from serin.machine.locks import try_lock

Signed = TypeVar("Signed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    pid: int
    host: str
    user: str
    since: float


def signature() -> Signature:
    """This process, now."""
    return Signature(pid=os.getpid(), host=socket.gethostname(), user=environment.user(), since=time.time())


def take(stack: ExitStack, path: Path, *, shared: bool = False, create: bool = True) -> int | None:
    """A lock that `stack` releases; None when another process has it. An exclusive one empties the file: what a former
    holder wrote is no longer true."""
    file = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
    if not try_lock(file, shared=shared):
        os.close(file)
        return None
    stack.callback(os.close, file)
    if not shared:
        os.ftruncate(file, 0)
    return file


def is_held(path: Path) -> bool:
    """Whether somebody who lives holds it exclusively."""
    with ExitStack() as moment:
        try:
            return take(moment, path, shared=True, create=False) is None
        except FileNotFoundError:
            return False


def sign(file: int, content: Mapping[str, object]) -> None:
    os.pwrite(file, json.dumps(content).encode(), 0)


def living(paths: Iterable[Path], kind: type[Signed]) -> Iterator[Signed]:
    """What those who live have signed, of the files that hold a `kind`."""
    for path in paths:
        if not is_held(path):
            continue
        try:
            yield kind(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue  # taken this instant and not signed yet
