"""Prefect's own command in a process that imports quickly: `python -m serin.stack.prefect.command COMMAND ...`.

Prefect's server and workers spend seconds on imports, a sixth of it in the garbage collector: it is off until they are
done. In the server a thread collects afterwards, not the event loop. With `--after FILE` the command begins when the
file exists: workers import while the server does, and begin when it may give them work.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import runpy
import sys
import threading
import time
from pathlib import Path

IMPORTED = {
    "server": ("prefect.cli", "prefect.server.api.server"),
    "worker": (
        "prefect.cli",
        "prefect.workers.base",
        "prefect.events.clients",
        "serin.stack.prefect.collection",
    ),
}
_AFTER = "--after"
_LOOK_S = 0.02
_COLLECT_S, _FULL_EVERY = 1.0, 30


def main(arguments: list[str]) -> None:
    after = None
    if arguments[:1] == [_AFTER]:
        after, arguments = Path(arguments[1]), arguments[2:]
    gc.disable()
    for module in IMPORTED.get(next((word for word in arguments if word in IMPORTED), ""), ()):
        with contextlib.suppress(
            ModuleNotFoundError
        ):  # another release of Prefect: the command imports what it needs
            importlib.import_module(module)
    gc.freeze()
    if "server" in arguments:
        collect_beside()
    else:
        gc.enable()
    while after is not None and not after.exists():
        time.sleep(_LOOK_S)  # it ends with the supervisor
    sys.argv = ["prefect", *arguments]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)


def collect_beside() -> None:
    """Leaves garbage to a thread. A cursor among it needs its connection, which may be waiting for SQLite's lock for up
    to a minute; if the event loop waited for that, nobody would release the lock."""

    def collect() -> None:
        for number in itertools.count(1):
            time.sleep(_COLLECT_S)
            gc.collect(2 if number % _FULL_EVERY == 0 else 1)

    gc.disable()
    threading.Thread(target=collect, name="garbage", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
