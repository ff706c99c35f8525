"""Notices that the host of a run is silent: its worker's report, which is written each second, stays the same."""

from __future__ import annotations

import time

from serin.formats.cluster.host_report import PREFIX, WorkerReport, read_report
from serin.store.stage_results import shared_objects

SILENT_S = 60.0


class RunHost:
    """Follows the host that executes a run. Measures by this process's clock, by the change of the beat."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._seen: tuple[str, int] | None = None  # the report's key and its beat ...
        self._since = 0.0  # ... and when it was seen first

    def silent(self) -> str | None:
        """The name of the host, when it is silent for SILENT_S; None while it reports, or when none has the run."""
        shared = shared_objects()
        if shared is None:
            return None
        keys = [key for key in shared.keys(PREFIX) if "/worker-" in key]
        known = None if self._seen is None else self._seen[0]
        for key in [known] if known in keys else keys:
            report = read_report(WorkerReport, shared, key)
            if report is None or self._run not in report.runs:
                continue
            now = time.monotonic()
            if self._seen != (key, report.beat):
                self._seen, self._since = (key, report.beat), now
            return report.host if now - self._since > SILENT_S else None
        self._seen = None
        return None
