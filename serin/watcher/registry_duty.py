"""The duty by which MLflow's aliases follow the rollouts, where MLFLOW_TRACKING_URI names a server.

A process does it (export/registry.py), so that neither a server that is away nor an upload holds up anything here.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

from serin.export.registry import CANDIDATE, CHAMPION, Aliases
from serin.machine import environment
from serin.watcher.duty import Duty
from serin.watcher.served import watched_statuses

log = logging.getLogger(__name__)

Wanted = Mapping[str, Aliases]  # by model
_FIRST_S: Final = 5.0  # until the next attempt after one that failed; twice as long after each
_LONGEST_S: Final = 300.0
_LIMIT_S: Final = 900.0  # for one attempt, which may upload models
_LAST: Final = 2000


class RegistryDuty(Duty):
    """Begins an attempt when something has changed, and again after one that failed. Nothing has to be stored: a new
    watcher begins with an attempt, which changes nothing where all is right."""

    name, every_s = "MLflow", 5.0

    def __init__(self, home: Path) -> None:
        self._home = home
        self._done: Wanted = {}
        self._attempt: _Attempt | None = None
        self._due, self._pause_s = 0.0, _FIRST_S

    def tick(self, now: float) -> None:
        if environment.text("MLFLOW_TRACKING_URI") is None:
            return
        if self._attempt is not None:
            self._look_at(self._attempt, now)
        if self._attempt is None and now >= self._due:
            wanted = {
                model.name: {
                    CHAMPION: model.live,
                    CANDIDATE: model.rollout.version if model.rollout.running else None,
                }
                for model in watched_statuses(self._home)
            }
            if wanted != self._done:
                self._attempt = _Attempt(wanted, now)

    def _look_at(self, attempt: _Attempt, now: float) -> None:
        problem = attempt.problem(now)
        if problem is None:
            return
        self._attempt = None
        if not problem:
            self._done, self._pause_s = attempt.wanted, _FIRST_S
            log.info("MLflow's aliases are those of the rollouts")
            return
        log.warning("MLflow's aliases are set later, in %.0f s: %s", self._pause_s, problem)
        self._due, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _LONGEST_S)

    def close(self) -> None:
        if self._attempt is not None:
            self._attempt.end()


class _Attempt:
    """A process that makes MLflow's aliases those that are wanted."""

    def __init__(self, wanted: Wanted, now: float) -> None:
        self.wanted, self._until = wanted, now + _LIMIT_S
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - read when it has ended
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(wanted).encode())
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serin.export.registry", str(os.getpid())],
                stdin=given, stdout=self._output, stderr=self._output, env=environment.child_environment(),
            )  # fmt: skip

    def problem(self, now: float) -> str | None:
        """Returns None while it runs, then why it failed, or nothing."""
        code = self._process.poll()
        if code is None:
            if now < self._until:
                return None
            self.end()
            return f"not done within {_LIMIT_S:.0f} s"
        self._output.seek(0)
        said = self._output.read()[-_LAST:].decode(errors="replace").strip().splitlines()
        self._output.close()
        return "" if code == 0 else (said[-1] if said else f"exit code {code}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
