"""A process that has imported the flows and forks one process for each run: `python -m
deployments.workers.warm_process`.

Importing takes longer than many stages. A worker keeps one such process (standby.py) and sends it the environment of a
run as one message on the socket that is its standard input. The fork has its own session, records which run it has,
and runs Prefect's engine. This process reports pids and exit codes on the same socket.

What a training and an export import is imported later, when no run has arrived for a second: torch takes as long as
everything else together.

Only what survives a fork may be in memory: no Python thread, no open GPU. Where that does not hold, or where a run
would find something else in a new process (another environment is wanted, a source file was edited), the fork replaces
itself with `python -m prefect.engine`, which is the command that Prefect's own process worker starts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.host.process_scan import record_run
from serin.machine import environment
from serin.prefect.processes import is_starting

from .run_output import open_run_output  # relative: as in the worker, whose package has another name

MESSAGE_BYTES = 1 << 20
_MODULE = "deployments.workers.warm_process"
_ENGINE = "prefect.engine"
_IMPORTED = (
    "prefect.flow_engine", "prefect.task_engine", "prefect.deployments.steps.core", "fastapi", _ENGINE,
    "serin.prefect.pull", "flows.placed", "flows.pipeline", "flows.stages", "serin.etl.build",
    "fsspec.implementations.local", "graphviz", "encodings.idna",  # what Prefect imports in its first run
)  # fmt: skip
_IMPORTED_LATER = ("torch", "onnx")  # not ONNX Runtime: its import starts a thread
_IDLE_S = 1.0
_STARTING_S, _LOOK_S = 60.0, 0.1
_OF_THE_RUN = "PREFECT__"  # variables that differ from run to run; no import reads them
_GPU_FILES = "/dev/nvidia"


def main() -> None:
    _wait_for_the_stack()
    imports = Imports()
    imports.add(_IMPORTED)
    wanted = _fork_for_each_run(socket.socket(fileno=0), imports)
    if wanted is None:  # the worker has ended
        return
    if not (fits(wanted) and survives_a_fork() and imports.sources.are_unchanged()):
        os.execve(sys.executable, [sys.executable, "-m", _ENGINE], wanted)
    environment.replace(wanted)
    _draw_other_numbers()
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


class Imports:
    """What this process has imported for its forks."""

    def __init__(self) -> None:
        self._began = time.time_ns()
        self._later = list(_IMPORTED_LATER)
        self.sources = Sources(began=self._began, files={})

    def add(self, modules: Sequence[str]) -> None:
        gc.disable()
        try:
            for module in modules:
                importlib.import_module(module)
        finally:
            gc.freeze()  # a collection in a fork would copy the pages of everything that was imported
            gc.enable()
        self.sources = Sources.of_this_process(self._began)

    @property
    def idle_s(self) -> float | None:
        """How long to wait for a run before the next import; None: there is none left."""
        return _IDLE_S if self._later else None

    def add_next(self) -> None:
        """Imports one of the modules for later."""
        with contextlib.suppress(ImportError):  # the stage that needs it says so
            self.add([self._later.pop(0)])


def _fork_for_each_run(channel: socket.socket, imports: Imports) -> dict[str, str] | None:
    """Returns in each fork, with the environment of its run; in this process when the worker has ended, with None."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler is needed for the wake-up
    _report_ended(channel)  # of an earlier program of this process
    while True:
        ready, _, _ = select.select([channel.fileno(), woken], [], [], imports.idle_s)
        if not ready:
            imports.add_next()
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(channel)
        if channel.fileno() not in ready:
            continue
        message = channel.recv(MESSAGE_BYTES)
        if not message:
            channel.detach()
            return None
        asked = json.loads(message)
        begun, begins = os.pipe2(os.O_CLOEXEC)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it counts the threads of OpenBLAS
            pid = os.fork()
        if pid == 0:
            channel.detach()
            _begin_run(asked["run"])
            os.write(begins, b"\n")
            for pipe in (begun, begins, woken, wake):
                os.close(pipe)
            variables: dict[str, str] = asked["variables"]
            return variables
        os.close(begins)
        os.read(begun, 1)  # it can be signalled from now on, or has ended
        os.close(begun)
        _report(channel, {"run": asked["run"], "pid": pid})
        if not imports.sources.are_unchanged():
            os.execv(sys.executable, [sys.executable, "-m", _MODULE])  # its forks remain its children


def _begin_run(run: str) -> None:
    """Makes this fork a process that signals and the reconciler find as that of `run`."""
    os.setsid()  # signals reach the run with all its processes, and not the worker
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with open_run_output() as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    record_run(environment.home(), run, os.getpid())


def _report_ended(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _report(channel, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _report(channel: socket.socket, what: Mapping[str, Any]) -> None:
    try:
        channel.send(json.dumps(what).encode())
    except OSError:  # the worker has ended; the next read shows it
        return


def _draw_other_numbers() -> None:
    """Seeds numpy's global generator, which would give every fork the same numbers. Python seeds its own after a
    fork."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def survives_a_fork() -> bool:
    """Returns whether a fork of this process works as a new process would: threads do not survive, nor does CUDA once
    it has opened a GPU. The driver's library may be loaded: torch may do that."""
    if threading.active_count() > 1:
        return False
    return not any(name.startswith(_GPU_FILES) for name in _open_files())


def _open_files() -> Iterator[str]:
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of this folder
            yield str(file.readlink())


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
        """Modules that are made in memory are left out: torch's have names of files without a folder."""
        names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        return cls(
            began=began, files={name: _identity(name) for name in names if name and Path(name).is_absolute()}
        )

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


if __name__ == "__main__":
    main()
