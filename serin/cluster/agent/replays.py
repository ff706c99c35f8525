"""Runs the replays that the desired state asks of this host, and uploads what they report.

cluster/replays/<run>/<host>/<seq>.json      some reports, removed by the controller that has read them
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serin.cluster.shadow.process import Job, ReplayProcess
from serin.errors import ReplayEnded
from serin.formats.cluster.desired_state import DesiredState, ReplayJob, replay_prefix
from serin.rollout.run.verification import FOREIGN
from serin.store.artifacts import Endpoint, Release
from serin.store.objects import Objects


@dataclass(slots=True)
class _Run:
    process: ReplayProcess | None
    seq: int = 0
    pending: list[Mapping[str, Any]] = field(default_factory=list)


class Replays:
    """`endpoint`: where a release of this host answers."""

    def __init__(self, home: Path, host: str, endpoint: Callable[[Release], Endpoint]) -> None:
        self._home, self._host, self._endpoint = home, host, endpoint
        self._runs: dict[str, _Run] = {}

    def step(self, objects: Objects, desired: DesiredState) -> None:
        """Starts and stops replays, and uploads reports. Raises StoreUnreachable; nothing is lost then."""
        wanted = {job.run: job for job in desired.replays.values() if self._host in job.places}
        for gone in self._runs.keys() - wanted.keys():
            self._end(self._runs.pop(gone))
        for run, job in wanted.items():
            if run not in self._runs:
                self._runs[run] = self._begun(job)
            self._upload(objects, run, self._runs[run])

    def close(self) -> None:
        for run in self._runs.values():
            self._end(run)
        self._runs.clear()

    def _begun(self, job: ReplayJob) -> _Run:
        try:
            address = job.address or self._endpoint(Release.parse(job.candidate)).http
        except FOREIGN as error:
            return _Run(process=None, pending=[{"ended": str(error)}])
        return _Run(
            process=ReplayProcess(
                Job(
                    replay=job,
                    home=str(self._home),
                    parent=os.getpid(),
                    address=address,
                    place=job.places[self._host],
                )
            )
        )

    def _upload(self, objects: Objects, name: str, run: _Run) -> None:
        if run.process is not None:
            try:
                run.pending += run.process.take()
            except ReplayEnded as error:
                self._end(run)
                run.pending.append({"ended": str(error)})
        if run.pending:
            key = f"{replay_prefix(name)}{self._host}/{run.seq + 1:012d}.json"
            objects.put(key, json.dumps(run.pending).encode())
            run.seq, run.pending = run.seq + 1, []

    def _end(self, run: _Run) -> None:
        if run.process is not None:
            run.process.stop()
        run.process = None
