"""Starts and reads the process that sends recorded requests to a candidate."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from serin.errors import ReplayEnded
from serin.formats.cluster.desired_state import ReplayJob
from serin.machine.typed_json import Document

_STOP_S: Final = 5.0


class ReplayProcess:
    """A replay that runs on this host. Its reports are collected by a thread, so that `take` never waits."""

    def __init__(self, job: Job) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serin.cluster.shadow.replay"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(job.dump().decode() + "\n")
            self._process.stdin.close()
        self._reports: deque[dict[str, Any]] = deque()
        self._reader = threading.Thread(target=self._read, name="replay", daemon=True)
        self._reader.start()

    def take(self) -> list[Mapping[str, Any]]:
        """Returns what was reported since the last call. ReplayEnded: the process has exited and nothing is left."""
        ended = not self._reader.is_alive()
        found: list[Mapping[str, Any]] = []
        while self._reports:
            found.append(self._reports.popleft())
        if ended and not found:
            code = self._process.wait()
            raise ReplayEnded(
                reason=f"their process exited with code {code}; this process's log has its output"
            )
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(_STOP_S)
        self._reader.join(_STOP_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # the last line of a killed process
                    self._reports.append(json.loads(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Document):
    """`address`: of the candidate's HTTP endpoint. `place`: where the replay continues."""

    replay: ReplayJob
    home: str
    parent: int
    address: str
    place: Mapping[str, Any]
