"""A process that has imported the flows and waits for one run: `python -m deployments.workers.warm_process`.

Importing takes longer than many stages. The worker keeps one such process waiting (standby.py) and writes the
environment of a run to its standard input, as one line of JSON. The process then runs Prefect's engine. It is used
once, and nothing is forked.

A process that differs from a new one (another environment is wanted, a source file was edited) replaces itself with
`python -m prefect.engine`, which is the command that Prefect's own process worker starts.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serin.machine import environment
from serin.stack.prefect.processes import is_starting

_ENGINE = "prefect.engine"
_IMPORTED = (
    "prefect.flow_engine", "prefect.task_engine", "prefect.deployments.steps.core", "fastapi",
    "serin.stack.prefect.pull", "flows.placed", "flows.pipeline", "serin.etl.build",
)  # fmt: skip
_STARTING_S, _LOOK_S = 60.0, 0.1
_OF_THE_RUN = "PREFECT__"  # variables that differ from run to run; no import reads them


def main() -> None:
    _wait_for_the_stack()
    began = time.time_ns()
    for module in _IMPORTED:
        importlib.import_module(module)
    imported = Sources.of_this_process(began)
    line = sys.stdin.buffer.readline()
    if not line:  # the worker has ended
        return
    wanted: dict[str, str] = json.loads(line)
    _close_input()
    if not (fits(wanted) and imported.are_unchanged()):
        os.execve(sys.executable, [sys.executable, "-m", _ENGINE], wanted)
    environment.replace(wanted)
    sys.argv = [_ENGINE]
    sys.modules.pop(_ENGINE, None)  # it was imported as a module; now it runs as a program
    runpy.run_module(_ENGINE, run_name="__main__")


def _wait_for_the_stack() -> None:
    """Waits while `serin up` is at work, for which these imports would only take processor time; not when a run is
    there."""
    deadline = time.monotonic() + _STARTING_S
    while is_starting(environment.home()) and time.monotonic() < deadline:
        if select.select([sys.stdin], [], [], _LOOK_S)[0]:
            return


def fits(wanted: Mapping[str, str]) -> bool:
    """Returns whether a run with the environment `wanted` would find the same in a new process as in this one."""
    own = environment.child_environment()
    differing = {name for name in own.keys() | wanted.keys() if own.get(name) != wanted.get(name)}
    return all(name.startswith(_OF_THE_RUN) for name in differing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The files of the modules that this process has loaded, as they were after the import."""

    began: int  # when the import began, in nanoseconds since 1970
    files: Mapping[str, tuple[int, int, int] | None]

    @classmethod
    def of_this_process(cls, began: int) -> Sources:
        names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        return cls(began=began, files={name: _identity(name) for name in names if name})

    def are_unchanged(self) -> bool:
        """Whether no file was written since the import began, replaced since it ended, or removed."""
        return all(
            was is not None and was[0] <= self.began and _identity(name) == was
            for name, was in self.files.items()
        )


def _identity(file: str) -> tuple[int, int, int] | None:
    """Returns the time of the last write, size and inode of a file.

    The inode's change time is left out: package managers link the same files into other environments, which changes it.
    """
    try:
        found = Path(file).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _close_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main()
