"""Serin's worker types for Prefect, and Prefect's own command in a process that imports quickly.

Prefect imports this module through the entry point group `prefect.collections`, in other projects' processes too. The
workers are in the application folder (the checkout, or serin/app of an installed wheel) and are loaded under a private
name, so that they do not hide the project's own `deployments` package.

`python -m serin.prefect.collection COMMAND ...` runs Prefect's command. Its workers spend seconds on imports, a sixth
of it in the garbage collector: it is off until they are done. With `--after FILE` the command begins when the file
exists: workers import while the server does, and begin when it may give them work.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import runpy
import sys
import time
from pathlib import Path

from serin.machine.application import application_folder

IMPORTED = ("prefect.cli", "prefect.workers.base", "prefect.events.clients", "serin.prefect.collection")
_PACKAGE = "serin_workers"
_AFTER = "--after"
_LOOK_S = 0.02


def load_workers() -> None:
    folder = application_folder() / "deployments" / "workers"
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    modules = ["worker", "slurm.worker"]
    if importlib.util.find_spec("prefect_kubernetes") is not None:  # it is in an extra
        modules.append("kubernetes_worker")
    for module in modules:
        importlib.import_module(f"{_PACKAGE}.{module}")


def run_command(arguments: list[str]) -> None:
    after = None
    if arguments[:1] == [_AFTER]:
        after, arguments = Path(arguments[1]), arguments[2:]
    gc.disable()
    for module in IMPORTED:
        with contextlib.suppress(
            ModuleNotFoundError
        ):  # in another release of Prefect; the command imports it
            importlib.import_module(module)
    gc.freeze()
    gc.enable()
    while after is not None and not after.exists():
        time.sleep(_LOOK_S)  # it ends with the supervisor
    sys.argv = ["prefect", *arguments]
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_command(sys.argv[1:])
else:
    load_workers()
