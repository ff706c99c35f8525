"""supervisord that notices a death at once, a process that is frozen within seconds, and survives a full disk:
`python -m serin.host.supervisord -n -c supervisord.conf`.

Its loop waits up to a second, then looks for dead children, and restarts them in the next round. Signals no longer
interrupt the wait (PEP 475), so a restart took one to two seconds. Here a signal ends the wait, and the next round does
not wait.

A line that it cannot log is lost. Its own logger would print the error, exit when that cannot be printed either, and
take the whole stack with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisor import loggers, poller, supervisord
from supervisor.states import ProcessStates

from serin.host.watchdog import Watchdog, beat_file
from serin.machine import heartbeat


class PromptPoller(poller.PollPoller):  # type: ignore[misc]
    _heard: int | None = None
    _told: int | None = None
    _again = False

    def poll(self, timeout: float) -> tuple[list[int], list[int]]:
        if self._heard is None:  # not earlier: supervisord closes open descriptors when it begins
            self._heard, self._told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        self.register_readable(self._heard)
        readable, writable = super().poll(0 if self._again else timeout)
        self._again = self._heard in readable
        if self._again:
            os.read(self._heard, 4096)
            readable.remove(self._heard)
        return readable, writable

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        for end in (self._heard, self._told):
            if end is not None:
                os.close(end)
        self._heard = self._told = None


class WatchingSupervisor(supervisord.Supervisor):  # type: ignore[misc]
    """Looks after each round whether the children work, and says that it works itself."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._watchdog: Watchdog | None = None

    def tick(self, now: float | None = None) -> None:
        super().tick(now)
        if self._watchdog is None:
            folder = Path(self.options.configfile).parent
            self._watchdog = Watchdog(folder.parent, folder / "conf.d", self.options.logger.warn)
            heartbeat.begin(beat_file(folder.parent, os.getpid()))
        heartbeat.beat(within_s=1.0)
        self._watchdog.look(
            (process.config.name, process.pid)
            for group in self.process_groups.values()
            for process in group.processes.values()
            if process.pid and process.state in (ProcessStates.STARTING, ProcessStates.RUNNING)
        )


def _forgiving(method: Callable[..., None]) -> Callable[..., None]:
    def call(handler: Any, *arguments: object) -> None:
        try:
            method(handler, *arguments)
        except (OSError, ValueError):
            if handler.stream.closed:  # it was being rotated
                with contextlib.suppress(OSError):
                    handler.stream = Path(handler.baseFilename).open("ab")  # noqa: SIM115 (it stays open)

    return call


def survive_full_disk() -> None:
    """Makes the log handlers of this process ignore what the disk refuses."""
    for kind in (loggers.Handler, loggers.FileHandler, loggers.RotatingFileHandler):
        for name in ("emit", "flush", "handleError"):
            if name in vars(kind):
                setattr(kind, name, _forgiving(vars(kind)[name]))


def main() -> None:
    survive_full_disk()
    supervisord.Supervisor = WatchingSupervisor
    poller.Poller = PromptPoller  # supervisord's options create their poller from this class
    supervisord.main(sys.argv[1:])


if __name__ == "__main__":
    main()
