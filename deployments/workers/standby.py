"""The worker's side of the process that forks a process for each run (warm_process.py): how a run is given to it, and
how the end of a run is learned."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import anyio
from anyio.abc import Process
from prefect.settings import get_current_settings
from prefect.utilities.processutils import sanitize_subprocess_env

from serin.host.process_scan import record_run, run_processes
from serin.machine import environment

from .run_output import open_run_output  # relative: the entry point loads this package under another name

APPLICATION = Path(__file__).resolve().parents[2]
_WAITING = "deployments.workers.warm_process"
_ENGINE = "prefect.engine"
_REPORT_BYTES = 4096
_LOOK_S = 0.2
_UNKNOWN = -1  # the exit code of a process whose parent ended before it


class RunProcess(Protocol):
    """The process of a run: a fork, or a new program where that was not possible."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    async def aclose(self) -> None: ...


class Standby:
    """Keeps the process from which runs are forked. It ends with the worker, because its socket ends."""

    def __init__(self) -> None:
        self._source: Source | None = None

    async def prepare(self) -> None:
        """Starts the process. If that fails (for example out of memory), the next run gets a new process."""
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        variables = sanitize_subprocess_env({**environment.child_environment(), **settings})
        with contextlib.suppress(OSError):
            self._source = await Source.start(variables)

    async def take(self, run: str, variables: Mapping[str, str]) -> RunProcess:
        """Returns a process that runs Prefect's engine for `run`: a fork, or a new one if that is not possible."""
        source = self._source
        fork = None if source is None else await source.fork(run, variables)
        if fork is not None:
            return fork
        if source is self._source:  # else another call has replaced it
            self._source = None
            if source is not None:
                await source.end()
        process = await start(_ENGINE, variables)
        record_run(environment.home(), run, process.pid)
        if self._source is None:
            await self.prepare()
        return process

    async def dismiss(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            await source.end()


class Source:
    """A process that forks, seen from the worker."""

    def __init__(self, process: Process, channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self._asked: dict[str, asyncio.Future[Fork | None]] = {}
        self._forks: dict[int, Fork] = {}
        self._answers = True
        asyncio.get_running_loop().add_reader(channel, self._read)

    @classmethod
    async def start(cls, variables: Mapping[str, str]) -> Source:
        channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps messages apart
        with other:
            channel.setblocking(False)
            try:
                process = await start(_WAITING, variables, stdin=other.fileno())
            except OSError:
                channel.close()
                raise
        return cls(process, channel)

    async def fork(self, run: str, variables: Mapping[str, str]) -> Fork | None:
        """Returns the fork that has the run; None if this process cannot give it one."""
        if not self._answers or run in self._asked:
            return None
        answer: asyncio.Future[Fork | None] = asyncio.get_running_loop().create_future()
        self._asked[run] = answer
        try:
            request = json.dumps({"run": run, "variables": dict(variables)}).encode()
            await asyncio.get_running_loop().sock_sendall(self._channel, request)
            return await answer
        except OSError:  # it has ended, or the environment is too large for a message
            return None
        finally:
            self._asked.pop(run, None)

    def _read(self) -> None:
        try:
            message = self._channel.recv(_REPORT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lost()
            return
        told = json.loads(message)
        if "run" in told:
            fork = self._forks[told["pid"]] = Fork(told["pid"])
            self._answer(told["run"], fork)
        elif (ended := self._forks.pop(told["pid"], None)) is not None:
            ended.has_ended(told["code"])

    def _lost(self) -> None:
        """This process has ended: its forks are followed without it. A fork may exist of which it could not tell."""
        self._stop_reading()
        for run in list(self._asked):
            found = run_processes(environment.home()).get(run)
            fork = Fork(found.engines[0]) if found is not None and found.engines else None
            if fork is not None:
                self._forks[fork.pid] = fork
            self._answer(run, fork)
        for fork in self._forks.values():
            fork.follow()
        self._forks.clear()

    def _answer(self, run: str, fork: Fork | None) -> None:
        answer = self._asked.get(run)
        if answer is not None and not answer.done():
            answer.set_result(fork)

    def _stop_reading(self) -> None:
        if self._answers:
            self._answers = False
            asyncio.get_running_loop().remove_reader(self._channel)

    async def end(self) -> None:
        """Ends this process; its forks continue."""
        if self._answers:
            self._lost()
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._process.kill()
        await self._process.aclose()


class Fork:
    """The process of a run that is not a child of the worker."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            self._handle: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and its exit code is on the way
            self._handle = None

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._code)  # a caller that stops waiting does not end it

    async def aclose(self) -> None:
        await self.wait()

    def has_ended(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)
        if self._handle is not None:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None

    def follow(self) -> None:
        """Learns of its end from the kernel, without the exit code."""
        if self._handle is None:
            self.has_ended(_UNKNOWN)
        else:
            asyncio.get_running_loop().add_reader(self._handle, self.has_ended, _UNKNOWN)


async def start(module: str, variables: Mapping[str, str], stdin: int = subprocess.DEVNULL) -> Process:
    """Starts a module as a program in its own session, where signals to the worker do not reach it."""
    with open_run_output() as output:
        return await anyio.open_process(
            [sys.executable, "-m", module],
            cwd=APPLICATION,
            env=variables,
            stdin=stdin,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


async def end_group(group: int, *, grace_s: float) -> None:
    """Sends SIGTERM to every process of a group; SIGKILL to those that are left after `grace_s`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        with anyio.move_on_after(grace_s):
            while True:
                os.killpg(group, 0)
                await anyio.sleep(_LOOK_S)
        os.killpg(group, signal.SIGKILL)
