"""A ProcessHost for tests: children of the test's own process, ended by their pid and dying with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable

from serin.serving.process import Process, ProcessState

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ChildHost:
    def __init__(self) -> None:
        self._children: dict[str, tuple[subprocess.Popen[bytes], Process]] = {}

    def start(self, process: Process) -> None:
        if self.state(process.name) == "running":
            return
        process.log.parent.mkdir(parents=True, exist_ok=True)
        with process.log.open("ab") as log:
            child = subprocess.Popen(
                process.command,
                env=process.environment,
                cwd=process.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._children[process.name] = child, process

    def stop(self, name: str) -> None:
        if name not in self._children:
            return
        child, process = self._children.pop(name)
        for number, wait_s in ((signal.SIGTERM, process.stop_s), (signal.SIGKILL, 10.0)):
            if child.poll() is None:
                child.send_signal(number)
            try:
                child.wait(wait_s)
                break
            except subprocess.TimeoutExpired:
                continue
        _end_group(child.pid)

    def kill(self, name: str) -> None:
        """At once, with its children: for ends that no test is about. Triton takes seconds to go by itself."""
        if name in self._children:
            _end_group(self._children[name][0].pid)
            self._children[name][0].wait()

    def state(self, name: str) -> ProcessState:
        if name not in self._children:
            return "absent"
        return "running" if self._children[name][0].poll() is None else "failed"

    def pid(self, name: str) -> int | None:
        return self._children[name][0].pid if self.state(name) == "running" else None

    def stop_all(self) -> None:
        for name in list(self._children):
            self.stop(name)


def wait_for(
    what: str, happened: Callable[[], bool], host: ChildHost, *names: str, within_s: float = 30.0
) -> None:
    """Returns when it happened; fails at once when one of the children it depends on is gone."""
    end = time.monotonic() + within_s
    while not happened():
        for name in names:
            assert host.state(name) == "running", f"{name} ended while the test waited for {what}"
        assert time.monotonic() < end, f"{what} did not happen within {within_s:g} s"
        time.sleep(0.02)


def _end_group(pid: int) -> None:
    """Triton's stubs share the session of their server."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
