"""What Prefect costs: the same pipeline bare, through the flow in one process, and with each stage placed on a worker.

Every lap trains from a table of its own, so that nothing is found; then the same again, where nothing has changed.
All run beside one stack, whose server works for the two that need it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.child import ContenderFailed
from benchmarks.machine import machine
from benchmarks.report import Report

Say = Callable[[str], None]
ROOT = Path(__file__).resolve().parents[2]
WAYS = ("bare", "inline", "worker", "placed")
STAGES = 3  # etl, train and export; with their parent four processes, one after the other
SHARE = 0.05


class Place:
    """A stack in a folder of its own, and the four ways to run a spec."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SERIN_HOME": str(folder / "home")}

    def run(self, *command: str, **variables: str) -> tuple[float, str]:
        """Seconds and output of one command."""
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=3600,
        )
        if done.returncode:
            raise ContenderFailed(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return time.perf_counter() - began, done.stdout

    def connect(self) -> None:
        """What `serin env` says, for the flow that runs in a process of its own."""
        lines = self.run("serin.cli", "env")[1]
        shown = subprocess.run(
            ["bash", "-ec", f"{lines}\nprintf '%s\\n' \"$PREFECT_API_URL\" \"$PREFECT_API_AUTH_STRING\""],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        url, login = shown.stdout.split()
        self.environment |= {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": login}

    def lap(self, way: str, spec: Path) -> tuple[float, float]:
        """Seconds of the whole command, and of the flow alone where that can be told."""
        if way == "bare":
            return self.run("benchmarks.orchestration.bare", str(spec))[0], float("nan")
        if way == "inline":
            seconds, said = self.run(
                "benchmarks.orchestration.inline", str(spec), PREFECT_LOGGING_LEVEL="ERROR"
            )
            return seconds, float(said.split()[-1])
        placed = ["--placed"] if way == "placed" else []
        return self.run("serin.cli", "run", "--no-serve", *placed, str(spec))[0], float("nan")


def measure(*, full: bool, say: Say) -> Report:
    rows, epochs, laps = (2_000_000, 6, 3) if full else (400_000, 4, 1)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    again: dict[str, list[float]] = {way: [] for way in (*WAYS, "flow")}
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch, _stack(Path(scratch), say) as place:
        say("a lap that does not count: nobody is the first to read the libraries from the disk")
        place.lap("placed", write_pipeline(Path(scratch) / "first", rows=rows // 10, epochs=1))
        for number in range(laps):
            for way in (
                *WAYS[number % len(WAYS) :],
                *WAYS[: number % len(WAYS)],
            ):  # nobody is always the first
                spec = write_pipeline(Path(scratch) / f"{way}-{number}", rows=rows, epochs=epochs)
                times[way].append(place.lap(way, spec)[0])
                whole, flow = place.lap(way, spec)
                again[way].append(whole)
                if way == "inline":
                    again["flow"].append(flow)
                say(f"{way}: {times[way][-1]:.1f} s, nothing changed {whole:.1f} s")
    return Report(
        benchmark="orchestration",
        mode="full" if full else "quick",
        environment={
            "machine": machine(),
            "versions": {name: version(name) for name in ("prefect", "torch", "sqlalchemy")},
            "rows": rows,
            "epochs": epochs,
            "laps": laps,
        },
        cases={},
        line=key_figures(times, again),
        notes=[
            "seconds of whole commands, with the start of their processes; the stack itself is up already",
            "overhead is against the bare stages, which are one process and import everything once",
            "a longer pipeline has the same seconds of overhead and a smaller share",
            "placed_5_percent_s: how long one must be (computed, not run) for that share to be 5%",
        ],
        tables=table(times, again),
        figures={"seconds": times, "nothing_changed_s": again},
    )


def key_figures(times: dict[str, list[float]], again: dict[str, list[float]]) -> dict[str, float]:
    middle = {way: statistics.median(seconds) for way, seconds in times.items()}
    figures = {f"{way}_overhead": middle[way] / middle["bare"] - 1 for way in WAYS if way != "bare"}
    placed = middle["placed"] - middle["bare"]
    return {
        **figures,
        "bare_s": middle["bare"],
        "placed_overhead_s": placed,
        "placed_stage_s": placed / STAGES,
        "placed_5_percent_s": max(0.0, placed / SHARE),
        "unchanged_flow_s": statistics.median(again["flow"]),
        "unchanged_worker_s": statistics.median(again["worker"]),
        "unchanged_placed_s": statistics.median(again["placed"]),
    }


def table(times: dict[str, list[float]], again: dict[str, list[float]]) -> list[str]:
    bare = statistics.median(times["bare"])
    lines = [f"  {'':<10}{'pipeline':>12}{'overhead':>12}{'':>10}{'a stage':>12}{'nothing changed':>18}"]
    for way in WAYS:
        seconds = statistics.median(times[way])
        lines.append(
            f"  {way:<10}{seconds:>10.1f} s{seconds - bare:>10.1f} s{seconds / bare - 1:>10.1%}"
            f"{(seconds - bare) / STAGES:>10.1f} s"
            f"{statistics.median(again[way]):>16.1f} s"
        )
    return [*lines, f"  the flow alone, nothing changed: {statistics.median(again['flow']):.2f} s", ""]


@contextmanager
def _stack(folder: Path, say: Say) -> Iterator[Place]:
    place = Place(folder)
    say("starting a stack")
    place.run("serin.cli", "up")
    try:
        place.connect()
        yield place
    finally:
        place.run("serin.cli", "down")


def write_pipeline(folder: Path, *, rows: int, epochs: int) -> Path:
    """A spec and a table of its own."""
    folder.mkdir(parents=True)
    chance = np.random.default_rng(5)
    columns: dict[str, Any] = {f"x{index}": chance.normal(size=rows).astype(np.float32) for index in range(8)}
    columns |= {f"c{index}": chance.integers(0, 500, rows) for index in range(3)}
    score = columns["x0"] - columns["x1"] + columns["c0"] / 250 + chance.normal(size=rows)
    pq.write_table(pa.table({**columns, "y": score > 1}), folder / "table.parquet")
    spec = {
        "name": "orchestrated",
        "data": {
            "tables": {"table": "table.parquet"},
            "target": {"expression": "y", "task": "binary"},
        },
        "features": [
            {"columns": [f"x{index}" for index in range(8)], "steps": ["fill_median", "normalize"]},
            {"columns": [f"c{index}" for index in range(3)], "steps": ["categorify"]},
        ],
        "model": {"kind": "dcn", "hidden": [128, 64]},
        "training": {"epochs": epochs, "batch_rows": 4096, "seed": 3},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path
