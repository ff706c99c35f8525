"""The processes of runs: one that waits for the next run, and how a run is handed to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO

import anyio
from anyio.abc import Process
from prefect.settings import get_current_settings
from prefect.utilities.processutils import sanitize_subprocess_env

from serin.machine import environment
from serin.stack.host.run_processes import record_run

APPLICATION = Path(__file__).resolve().parents[2]
_WAITING = "deployments.workers.warm_process"
_ENGINE = "prefect.engine"
_LOG_BYTES = 10 << 20
_LOOK_S = 0.2


class Standby:
    """Keeps one process waiting for a run. It ends with the worker, because its standard input ends."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def prepare(self) -> None:
        """Starts the process. If that fails (for example out of memory), the next run gets a new process."""
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        variables = sanitize_subprocess_env({**environment.child_environment(), **settings})
        with contextlib.suppress(OSError):
            self._process = await _start(_WAITING, variables, stdin=subprocess.PIPE)

    async def take(self, run: str, variables: Mapping[str, str]) -> Process:
        """Returns a process that runs Prefect's engine for `run`: the waiting one, or a new one if that does not
        respond."""
        waiting, self._process = self._process, None
        try:
            if waiting is not None and await _hand_over(waiting, run, variables):
                return waiting
            process = await _start(_ENGINE, variables)
            record_run(environment.home(), run, process.pid)
            return process
        finally:
            await self.prepare()

    async def dismiss(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _end(process)


async def _start(module: str, variables: Mapping[str, str], stdin: int = subprocess.DEVNULL) -> Process:
    with _open_log() as log:
        return await anyio.open_process(
            [sys.executable, "-m", module],
            cwd=APPLICATION,
            env=variables,
            stdin=stdin,
            stdout=log,
            stderr=log,
            start_new_session=True,  # signals reach the run with all its processes, and not the worker
        )


async def _hand_over(process: Process, run: str, variables: Mapping[str, str]) -> bool:
    """Hands the run over; returns whether the process received it. It is recorded first: the worker may be killed at
    any time."""
    if process.returncode is None and process.stdin is not None:
        record_run(environment.home(), run, process.pid)
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await process.stdin.send(json.dumps(dict(variables)).encode() + b"\n")
            await process.stdin.aclose()
            return True
    await _end(process)
    return False


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        process.kill()
    await process.aclose()


async def end_group(group: int, *, grace_s: float) -> None:
    """Sends SIGTERM to every process of a group; SIGKILL to those that are left after `grace_s`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        with anyio.move_on_after(grace_s):
            while True:
                os.killpg(group, 0)
                await anyio.sleep(_LOOK_S)
        os.killpg(group, signal.SIGKILL)


def _open_log() -> IO[bytes]:
    """Opens the log of runs. The worker's output is a pipe that breaks when the worker dies, which would end the
    run."""
    path = environment.home() / "logs" / "runs.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > _LOG_BYTES:
        path.replace(path.with_name("runs.log.1"))  # runs that have it open continue to write there
    return open(path, "ab", opener=partial(os.open, mode=0o600))
