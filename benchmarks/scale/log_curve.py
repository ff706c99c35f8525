"""The curve of the request log: CPU seconds to read and judge so many lines, as a controller does, file by file."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.child import Child
from benchmarks.scale.curves import Curve

QUICK = (10_000, 50_000, 300_000)
FULL = (100_000, 1_000_000, 10_000_000, 100_000_000)
FILE_LINES = 100_000  # the gateway's log is rotated: a file never holds all


def measure_log(*, full: bool, say: Callable[[str], None]) -> tuple[list[Curve], list[str]]:
    """Returns the curve, and a note on memory."""
    points, peaks = {}, {}
    for lines in FULL if full else QUICK:
        with (
            tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch,
            Child("benchmarks.scale.log_curve", python=sys.executable, threads=1) as child,
        ):
            lap = child.run({"lines": lines, "folder": scratch})
        points[lines], peaks[lines] = lap.seconds, lap.peak_bytes
        say(f"log of {lines:,} lines")
    curve = Curve(
        name="log",
        what="reading and judging the gateway's log by lines",
        unit="CPU seconds",
        expected=1.0,
        points=points,
    )
    memory = ", ".join(f"{peak / 1e6:,.0f} MB for {lines:,} lines" for lines, peak in peaks.items())
    return [curve], [f"memory of the process that reads the log: {memory}"]


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """A contender: writes one file of the log at a time and times what reads it."""
    from benchmarks.scale.evidence_load import judge_log, write_log
    from serin.rollout.decide.evidence import Evidence

    log, evidence, seconds, done = Path(request["folder"]) / "requests.jsonl", Evidence(), 0.0, 0
    while done < request["lines"]:
        count = min(FILE_LINES, request["lines"] - done)
        write_log(log, first=done, lines=count)
        done += count
        began = time.process_time()
        evidence = judge_log(log, evidence)
        seconds += time.process_time() - began
    return {"seconds": seconds, "compared": evidence.compared}
