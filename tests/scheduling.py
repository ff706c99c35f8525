"""Which tests a worker of `make test` is given at once."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# Real stacks one after another, and one Prefect server for all flows. These are slow, so they come first.
TOGETHER = {"tests/e2e": "stacks", "tests/flows": "flows", "tests/tasks": "flows"}


def scope(nodeid: str) -> str:
    """What must run one after another in one process: a file, or several that share something dear."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file.rpartition("/")[0], file)


class ByScope(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)
