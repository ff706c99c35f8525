"""The process of a run, with its imports behind it: `python -m deployments.engine`.

Importing Prefect and the flows takes longer than many a stage. A worker (worker.py) keeps one such process waiting.
Told on its standard input what to run, it becomes that run: the same process, nothing is forked, and it is used once.

A run must not notice. A process that is no longer what a new one would be (another environment is wanted, a source was
edited) starts itself anew; a flow that lies elsewhere than ours is started by Prefect's own means.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.machine import environment
from serin.stack.host.process_scan import RUN_MARK

APPLICATION = Path(__file__).resolve().parents[1]
ENGINE = "prefect.engine"  # stands in the command line, by which the processes of runs are known
SUPERVISOR = (
    "prefect.runner._workspace_supervisor"  # Prefect's worker starts it; it prepares and becomes the engine
)
_IMPORTED = (
    "prefect.flow_engine", "prefect.task_engine", "prefect.deployments.steps.core", SUPERVISOR, "fastapi",
    "flows.placed", "flows.pipeline", "serin.etl.build",
)  # fmt: skip
_OF_THE_RUN = "PREFECT__"  # variables that differ from run to run and that no import looks at
PLACEHOLDER = "SERIN__AWAITS_ITS_ID"  # as long as RUN_MARK, with a value as long as an id


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What Prefect would have started a process with."""

    config: str  # of its supervisor
    folder: str
    environment: dict[str, str]


class _Prepared(BaseException):
    """Passes through everything that Prefect's supervisor catches."""

    def __init__(self, variables: dict[str, str]) -> None:
        super().__init__()
        self.variables = variables


def waiting_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Of a process that waits: room for the id of its run, which it can write there itself."""
    assert len(PLACEHOLDER) == len(RUN_MARK)
    return {**variables, PLACEHOLDER: "0" * 36}


def main(arguments: Sequence[str]) -> None:
    began = time.time_ns()
    for module in _IMPORTED:
        importlib.import_module(module)
    if arguments == [ENGINE]:
        told = sys.stdin.buffer.readline()
        if not told:  # the worker is gone
            return
        order = Order(**json.loads(told))
        if not (_fits(order.environment, began) and _show_run(order.environment[RUN_MARK])):
            _begin_anew(order)
        _close_input()
    else:
        config, folder, _ = arguments
        order = Order(config=config, folder=folder, environment=environment.child_environment())
    _run(order)


def _fits(wanted: Mapping[str, str], began: int) -> bool:
    """Would a new process be like this one?"""
    own = environment.child_environment(**{PLACEHOLDER: None})
    others = {name for name in own.keys() | wanted.keys() if own.get(name) != wanted.get(name)}
    return all(name.startswith(_OF_THE_RUN) for name in others) and not _edited_since(began)


def _edited_since(began: int) -> bool:
    """Whether a file of a module that is loaded was written later than `began` (nanoseconds since 1970), or is gone."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    try:
        return any(Path(file).stat().st_ctime_ns > began for file in files if file)
    except OSError:
        return True


def _show_run(run: str) -> bool:
    """Writes the run's id over the placeholder in what /proc shows of this process's environment, where the stack
    looks for it. False: it cannot be done here."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        first, last = int(fields[47]), int(fields[48])  # where the environment lies in memory
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            memory.seek(first)
            at = memory.read(last - first).find(f"\0{PLACEHOLDER}=".encode())
            if at < 0 or len(run) != 36:
                return False
            memory.seek(first + at + 1)
            memory.write(f"{RUN_MARK}={run}".encode())
        return f"{RUN_MARK}={run}".encode() in Path("/proc/self/environ").read_bytes().split(b"\0")
    except (OSError, ValueError, OverflowError):
        return False


def _begin_anew(order: Order) -> None:
    os.chdir(APPLICATION)
    command = [sys.executable, "-m", "deployments.engine", order.config, order.folder, ENGINE]
    os.execve(command[0], command, order.environment)


def _close_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _run(order: Order) -> None:
    """Prefect's supervisor, and then its engine, in this process."""
    supervisor: Any = importlib.import_module(SUPERVISOR)
    by_exec = supervisor._launch_engine  # noqa: SLF001

    async def launch(command: list[str], *, cwd: Path, environment: dict[str, str]) -> int:
        if command[1:] != ["-m", ENGINE] or command[0] != sys.executable or cwd != APPLICATION:
            code: int = await by_exec(command, cwd=cwd, environment=environment)
            return code
        raise _Prepared(environment)

    supervisor._launch_engine = launch  # noqa: SLF001
    environment.replace(order.environment)
    os.chdir(order.folder)
    try:
        sys.exit(supervisor.main([order.config]))
    except _Prepared as prepared:
        environment.replace(prepared.variables)
    os.chdir(APPLICATION)
    sys.argv = [ENGINE]
    sys.modules.pop(ENGINE, None)  # imported, and to be run
    runpy.run_module(ENGINE, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
