"""Which tests a worker of `make test` is given at once, in which order, and how many workers there are."""

import os
from collections.abc import Sequence
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# One stack for all tests of the whole; one Prefect server for all flows; all sources parsed once.
TOGETHER = {
    "tests/e2e/stack": "stack",
    "tests/flows": "flows",
    "tests/tasks": "flows",
    "tests/architecture": "sources",
}
# The longest first, so that no worker is left with one of them at the end.
FIRST = ("stack", "flows", "tests/e2e", "tests/unit/training", "tests/unit/export")


def scope(nodeid: str) -> str:
    """What must run one after another in one process: a file, or several that share something dear."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file.rpartition("/")[0], file)


def order(nodeid: str) -> tuple[int, str]:
    """Sorts tests by file; those of a file stay as they were collected."""
    mine = scope(nodeid)
    place = next((place for place, name in enumerate(FIRST) if mine.startswith(name)), len(FIRST))
    return place, nodeid.partition("::")[0]


def in_turn(folder: str, without: Sequence[str], worker: int, of: int) -> list[str]:
    """The files with tests, from another one on for each worker: what one has compiled the others find compiled."""
    files = sorted(str(file) for file in Path(folder).rglob("test_*.py"))
    wanted = [file for file in files if not file.startswith(tuple(f"{name}/" for name in without))]
    first = len(wanted) * worker // of
    return wanted[first:] + wanted[:first]


def workers() -> int:
    """One more than there are cores: tests of real servers wait a part of the time."""
    return len(os.sched_getaffinity(0)) + 1


class ByScope(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)
