"""Which tests a worker of `make test` is given at once, in which order, and how many workers there are."""

import os

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


def order(nodeid: str) -> int:
    """Sorts tests; those with the same number stay as they were collected."""
    mine = scope(nodeid)
    return next((place for place, name in enumerate(FIRST) if mine.startswith(name)), len(FIRST))


def workers() -> int:
    """Two more than there are cores: tests of real servers wait most of the time."""
    return len(os.sched_getaffinity(0)) + 2


class ByScope(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)
