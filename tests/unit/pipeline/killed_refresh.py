"""Refreshes of lookups, each in its own process, that are killed when they come to a step.

    python -m tests.unit.pipeline.killed_refresh STORE MODEL MODULE:STEP ...

After each it prints the step and the editions in the store then.
"""

import os
import signal
import sys
from functools import reduce
from importlib import import_module
from typing import Any

from serin.etl import lookups as _etl  # noqa: F401  -- once, before the first fork
from serin.export import edition as _export  # noqa: F401
from serin.pipeline.lookups import find_or_publish
from serin.store.store import Store


def end(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refresh(url: str, model: str, step: str) -> None:
    module, _, path = step.partition(":")
    *owners, name = path.split(".")
    setattr(reduce(getattr, owners, import_module(module)), name, end)
    store = Store(url)
    base = store.bundle(model, 1)
    find_or_publish(store, base, base.release)


def main() -> None:
    url, model, *steps = sys.argv[1:]
    for step in steps:
        child = os.fork()
        if child == 0:
            refresh(url, model, step)
            os._exit(0)  # the step was never reached
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(step, killed, Store(url).editions(model, 1), flush=True)


if __name__ == "__main__":
    main()
