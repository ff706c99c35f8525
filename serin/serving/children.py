"""A ProcessHost whose processes are children of this one and end with it, for temporary servers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial

from serin.errors import ReleaseNotReady
from serin.machine.parent_death import die_with_parent
from serin.machine.process import Process, ProcessState

_KILL_S = 10.0


class Children:
    def __init__(self) -> None:
        self._children: dict[str, tuple[subprocess.Popen[bytes], Process]] = {}

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    def start(self, process: Process) -> None:
        if self.state(process.name) == "running":
            return
        self.stop(process.name)  # leftovers of one that was killed: Triton's stubs outlive it
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
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (system calls, no lock)
            )
        self._children[process.name] = child, process

    def stop(self, name: str) -> None:
        if name not in self._children:
            return
        child, process = self._children.pop(name)
        for number, wait_s in ((signal.SIGTERM, process.stop_s), (signal.SIGKILL, _KILL_S)):
            if child.poll() is None:
                child.send_signal(number)
            try:
                child.wait(wait_s)
                break
            except subprocess.TimeoutExpired:
                continue
        _end_group(child.pid)

    def stop_all(self) -> None:
        for name in list(self._children):
            self.stop(name)

    def kill(self, name: str) -> None:
        """Kills a process and its children at once, where nobody is served any more: Triton takes seconds to exit by
        itself."""
        if name in self._children:
            _end_group(self._children[name][0].pid)
            self._children[name][0].wait()

    def state(self, name: str) -> ProcessState:
        if name not in self._children:
            return "absent"
        return "running" if self._children[name][0].poll() is None else "failed"

    def pid(self, name: str) -> int | None:
        return self._children[name][0].pid if self.state(name) == "running" else None

    def wait_for(self, name: str, ready: Callable[[], bool], *, within_s: float) -> None:
        """Returns when `ready`; raises ReleaseNotReady when the process ends before, or it takes longer."""
        end = time.monotonic() + within_s
        while not ready():
            log = self._children[name][1].log
            if self.state(name) != "running":
                raise ReleaseNotReady(release=name, reason="its process exited", log=log)
            if time.monotonic() > end:
                raise ReleaseNotReady(release=name, reason=f"it took more than {within_s:g} s", log=log)
            time.sleep(0.02)


def _end_group(pid: int) -> None:
    """Ends the rest of a child's process group: Triton's Python processes outlive one that was killed."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
