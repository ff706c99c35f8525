"""A Prefect worker that has the process of its next run waiting: `python -m deployments.worker start --pool cpu ...`.

The words are those of `prefect worker`, and so is all it does, but for how a process is started (engine.py). Where that
cannot be done it starts processes as Prefect does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import IO, Any

import anyio
import httpx
from anyio.abc import Process, TaskStatus
from prefect.cli import app
from prefect.client.schemas.objects import FlowRun
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventNameFilter
from prefect.runner import _starter_engine
from prefect.settings import get_current_settings
from prefect.utilities.processutils import sanitize_subprocess_env
from prefect.workers.process import ProcessWorker
from websockets.exceptions import WebSocketException

from deployments.engine import APPLICATION, ENGINE, SUPERVISOR, waiting_environment
from serin.machine import environment
from serin.stack.prefect.processes import scratch_folder

_WAITS = tuple(f"prefect.flow-run.{state}" for state in ("Scheduled", "AwaitingRetry", "Resuming"))
_PAUSES_S = (0.0, 0.1, 0.4)
_AGAIN_S = 5.0
_LOG_BYTES = 10 << 20

_prefects_own = _starter_engine.run_process


class Spare:
    """One process that waits for a run. It ends with the worker: its input does."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def prepare(self) -> None:
        """Starts one. Without it (no memory is left, say) a run is started as Prefect does."""
        with contextlib.suppress(OSError):
            self._process = await self._start()

    @staticmethod
    async def _start() -> Process:
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        variables = sanitize_subprocess_env({**environment.child_environment(), **settings})
        with _open_log() as log:
            return await anyio.open_process(
                [sys.executable, "-m", "deployments.engine", ENGINE],
                cwd=APPLICATION,
                env=waiting_environment(variables),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a group of its own, as Prefect gives to every run
            )

    async def take(self, order: dict[str, Any]) -> Process | None:
        """The process, which has been told; None when there was none that listened. The next is on its way."""
        process, self._process = self._process, None
        try:
            if process is None or process.returncode is not None or process.stdin is None:
                return None
            await process.stdin.send(json.dumps(order).encode() + b"\n")
            await process.stdin.aclose()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return None
        finally:
            await self.prepare()
        return process

    async def dismiss(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself, or was killed
                process.kill()
            await process.aclose()


def _open_log() -> IO[bytes]:
    """Where runs print. The worker's own output is a pipe that breaks when the worker dies, and a run with it."""
    path = environment.home() / "logs" / "runs.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > _LOG_BYTES:
        path.replace(path.with_name("runs.log.1"))  # who writes there goes on there
    return open(path, "ab", opener=partial(os.open, mode=0o600))


spare = Spare()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is another of this type: it takes its place

    class Worker(ProcessWorker):
        """Prefect's process worker with a spare process; it is told of new runs and does not only ask for them."""

        async def __aenter__(self) -> Worker:
            await super().__aenter__()
            self._asking = asyncio.Lock()
            self._listening = asyncio.create_task(self._listen())
            await spare.prepare()
            return self

        async def __aexit__(self, *why: Any) -> None:
            self._listening.cancel()
            with anyio.CancelScope(shield=True):
                await spare.dismiss()
            await super().__aexit__(*why)

        async def get_and_submit_flow_runs(self) -> list[FlowRun]:
            async with self._asking:  # one that was told and one whose time has come would take a run twice
                return await super().get_and_submit_flow_runs()

        async def _listen(self) -> None:
            """Asks for runs as soon as the server says that there is one. Where nobody says so, time tells."""
            while True:
                try:
                    async with get_events_subscriber(filter=await self._new_runs()) as events:
                        async for _ in events:
                            await self._ask()
                except (OSError, WebSocketException, httpx.HTTPError):  # it is being restarted
                    await asyncio.sleep(_AGAIN_S)

        async def _new_runs(self) -> EventFilter:
            while self._work_pool is None:  # noqa: ASYNC110 (Prefect has no event for it)
                await asyncio.sleep(_PAUSES_S[-1])
            pool = EventAnyResourceFilter(id=[f"prefect.work-pool.{self._work_pool.id}"])
            return EventFilter(event=EventNameFilter(name=list(_WAITS)), any_resource=pool)

        async def _ask(self) -> None:
            for pause_s in _PAUSES_S:  # the news may be quicker than the database
                await asyncio.sleep(pause_s)
                with contextlib.suppress(httpx.HTTPError):
                    if await self.get_and_submit_flow_runs():
                        return


async def run_process(
    command: list[str],
    *,
    task_status: TaskStatus[Any],
    task_status_handler: Callable[[Process], Any],
    env: dict[str, str],
    cwd: Any,
    **options: Any,
) -> Process:
    """In place of Prefect's own: the same command with the same environment, in the process that has waited."""
    process = None
    if command[:-1] == [sys.executable, "-m", SUPERVISOR]:
        process = await spare.take({"config": command[-1], "folder": str(cwd), "environment": env})
    if process is None:
        return await _prefects_own(
            command,
            task_status=task_status,
            task_status_handler=task_status_handler,
            env=env,
            cwd=cwd,
            **options,
        )
    async with process:  # ends it when the worker is told to end meanwhile
        task_status.started(task_status_handler(process))
        await process.wait()
    return process


def main() -> None:
    if hasattr(importlib.import_module(SUPERVISOR), "_launch_engine"):  # another Prefect may do it otherwise
        _starter_engine.run_process = run_process
    scratch = scratch_folder(environment.home())
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    tempfile.tempdir = str(scratch)  # in this process alone: what it starts may need shorter paths
    sys.argv[1:1] = ["--no-prompt", "worker"]
    app()


if __name__ == "__main__":
    main()
