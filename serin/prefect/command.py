"""Prefect's own command in a process that imports quickly: `python -m serin.prefect.command COMMAND ...`.

Prefect's workers spend seconds on imports, a sixth of it in the garbage collector: it is off until they are done. With
`--after FILE` the command begins when the file exists: workers import while the server does, and begin when it may give
them work.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import runpy
import sys
import time
from pathlib import Path

IMPORTED = ("prefect.cli", "prefect.workers.base", "prefect.events.clients", "serin.prefect.collection")
_AFTER = "--after"
_LOOK_S = 0.02


def main(arguments: list[str]) -> None:
    after = None
    if arguments[:1] == [_AFTER]:
        after, arguments = Path(arguments[1]), arguments[2:]
    gc.disable()
    for module in IMPORTED:
        with contextlib.suppress(
            ModuleNotFoundError
        ):  # another release of Prefect: the command imports what it needs
            importlib.import_module(module)
    gc.freeze()
    gc.enable()
    while after is not None and not after.exists():
        time.sleep(_LOOK_S)  # it ends with the supervisor
    sys.argv = ["prefect", *arguments]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
