"""Starts and reads the replay process of a rollout, and says which rollouts cannot have one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serin.errors import ReplayEnded, RolloutRefused
from serin.machine.typed_json import Document
from serin.rollout.decide.state import Rollout
from serin.serving.external import External
from serin.serving.triton.repository import serving_settings
from serin.spec.stored import stored_capture
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store

_STOP_S: Final = 5.0


class Replayer:
    """Replays recorded requests of the live version to a candidate, each rollout in its own process."""

    def __init__(
        self, home: Path, store: Store, external: External, endpoint: Callable[[Release], Endpoint]
    ) -> None:
        self._home, self._store, self._external, self._endpoint = home, store, external, endpoint

    def check(self, rollout: Rollout) -> None:
        """Raises RolloutRefused when requests of the live version are not recorded in a form that can be sent again."""
        live = rollout.stable
        if live is None:
            return
        if self._external.has(live):
            reason = "a server elsewhere has no bundle to compare its answers with; leave shadow out of rollout.steps"
            raise RolloutRefused(model=rollout.model, command="start", reason=reason)
        bundle = self._store.bundle(live.model, live.version)
        problem = stored_capture(Path(bundle.path)).not_replayable()
        if problem:
            reason = (
                f"shadow replays recorded requests of live version {live.version}: {problem} for this rollout (`serin "
                "rollout start --spec`)"
            )
            raise RolloutRefused(model=rollout.model, command="start", reason=reason)

    def start(self, rollout: Rollout, place: Mapping[str, Any]) -> ReplayProcess:
        assert rollout.plan.shadow is not None
        assert rollout.stable is not None
        candidate = rollout.candidate
        serving = serving_settings(self._store.bundle(candidate.model, candidate.version))
        job = Job(
            home=str(self._home),
            parent=os.getpid(),
            live=rollout.stable.name,
            candidate=candidate.name,
            address=self._endpoint(candidate).http,
            timeout_s=serving.request_timeout,
            max_batch_rows=serving.max_batch_rows,
            share=rollout.plan.shadow.share,
            rows=rollout.plan.shadow.rows,
            place=dict(place),
        )
        return ReplayProcess(job)


class ReplayProcess:
    """A running replay. Its reports are collected by a thread, so that `take` never waits."""

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
            raise ReplayEnded(code=self._process.wait())
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
    """`live` and `candidate` are names of releases, `place` is where the replay continues."""

    home: str
    parent: int
    live: str
    candidate: str
    address: str  # of the candidate's HTTP endpoint
    timeout_s: float
    max_batch_rows: int
    share: float
    rows: int
    place: dict[str, Any]
