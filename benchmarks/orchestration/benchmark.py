"""Measures what Prefect costs: the same stages as plain functions, as a flow in one process, through a worker, and
placed.

Every lap has a table with other rows: stage keys depend on the content of a table, so the same rows would be found, not
computed. The benchmark checks that each lap has made one training and one version. Then each lap runs again with
nothing changed. All run beside one stack, whose server is used by the three ways that need it.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from serin.store.store import Store

Say = Callable[[str], None]
ROOT = Path(__file__).resolve().parents[2]
WAYS = ("bare", "inline", "worker", "placed")
STAGES = 3  # etl, train and export; with their parent four processes, one after the other
SHARE = 0.05
MODEL = "orchestrated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """One pipeline, run one way."""

    seconds: float  # of the whole command
    call_s: float  # of the stages or the flow alone, where they run in the command's own process; else nan
    cpu_s: float  # of the command and the processes it waited for; incomplete for the others
    again_s: float  # the whole command, nothing changed
    again_call_s: float


Laps = dict[str, list[Lap]]


class Place:
    """A stack in its own folder, and the four ways to run a spec."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SERIN_HOME": str(folder / "home")}

    def run(self, *command: str, **variables: str) -> tuple[float, str]:
        """Returns seconds and output of one command."""
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
        """Sets the variables that `serin env` prints, for the flow in a separate process."""
        lines = self.run("serin.cli", "env")[1]
        shown = subprocess.run(
            ["bash", "-ec", f"{lines}\nprintf '%s\\n' \"$PREFECT_API_URL\" \"$PREFECT_API_AUTH_STRING\""],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        url, login = shown.stdout.split()
        self.environment |= {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": login}

    def lap(self, way: str, spec: Path, *, again: bool = True) -> Lap:
        """Runs the pipeline, and once more with nothing changed if `again`. Raises ContenderFailed when a result was
        found that had to be made."""
        before, cpu = self._made(), _cpu_s()
        seconds, call_s = self._once(way, spec)
        cpu_s, made = (
            _cpu_s() - cpu,
            tuple(now - then for now, then in zip(self._made(), before, strict=True)),
        )
        if made != (1, 1):
            raise ContenderFailed(f"{way}: {made[0]} trainings and {made[1]} versions instead of one of each")
        again_s, again_call_s = self._once(way, spec) if again else (float("nan"), float("nan"))
        return Lap(
            seconds=seconds, call_s=call_s, cpu_s=cpu_s, again_s=again_s, again_call_s=again_call_s
        )  # fmt: skip

    def _once(self, way: str, spec: Path) -> tuple[float, float]:
        if way in ("bare", "inline"):
            module = f"benchmarks.orchestration.{way}"
            seconds, said = self.run(module, str(spec), PREFECT_LOGGING_LEVEL="ERROR")
            return seconds, float(said.split()[-1])
        placed = ["--placed"] if way == "placed" else []
        return self.run("serin.cli", "run", "--no-serve", *placed, str(spec))[0], float("nan")

    def _made(self) -> tuple[int, int]:
        """Counts trainings and versions."""
        home = self.folder / "home"
        store = Store(str(home / "store"))
        return len(list(home.glob("runs/train-*/result"))), len(store.versions(MODEL))


def _cpu_s() -> float:
    """Returns the CPU seconds of all commands so far and of the processes they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(*, full: bool, say: Say) -> Report:
    rows, epochs, laps = (2_000_000, 6, 5) if full else (100_000, 1, 1)
    done: dict[str, list[Lap]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch, _stack(Path(scratch), say) as place:
        say("warm-up, so that no contender is the first to read the libraries from disk")
        if full:
            for number, way in enumerate(WAYS):
                spec = write_pipeline(Path(scratch) / f"first-{way}", rows=rows // 10, epochs=1, seed=number)
                place.lap(way, spec)
        else:
            place.run("benchmarks.orchestration.libraries")
        for number in range(laps):
            turn = number % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):  # rotate who comes first
                seed = 100 + number * len(WAYS) + WAYS.index(way)
                spec = write_pipeline(
                    Path(scratch) / f"{way}-{number}", rows=rows, epochs=epochs, seed=seed
                )  # fmt: skip
                again = way != "bare"  # a plain export runs again even if nothing changed
                done[way].append(lap := place.lap(way, spec, again=again))
                say(
                    f"{way}: {lap.seconds:.1f} s"
                    + (f", nothing changed {lap.again_s:.1f} s" if again else "")
                )
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
        line=key_figures(done),
        notes=[
            "seconds of whole commands, with process start-up; the stack is already up",
            "bare: the same stages as plain functions in one process; ratios are within a lap, the median is shown",
            "a worker's process has its imports done beforehand, the bare process has not",
            "a longer pipeline has the same seconds of overhead and a smaller share",
            "quick: one lap; placed_stage_s is then a third of the difference of two commands, and --full is steadier",
            "*_5_percent_s: how long a pipeline must be (computed, not run) for that share to be 5%",
            "bare has no figure for 'nothing changed': a plain export runs again",
        ],
        tables=table(done),
        figures={way: [asdict(lap) for lap in laps] for way, laps in done.items()},
    )


def key_figures(done: Laps) -> dict[str, float]:
    """Returns shares and differences against the bare stages of the same lap, as medians over laps."""
    ways = [way for way in WAYS if way != "bare"]
    placed_s = _middle(done, "placed", "bare", "seconds", _difference)
    return {
        "flow_overhead": _middle(done, "inline", "bare", "call_s", _share),
        **{f"{way}_overhead": _middle(done, way, "bare", "seconds", _share) for way in ways},
        "inline_cpu_overhead": _middle(done, "inline", "bare", "cpu_s", _share),
        "bare_s": _median(done["bare"], "seconds"),
        "flow_overhead_s": _middle(done, "inline", "bare", "call_s", _difference),
        **{f"{way}_overhead_s": _middle(done, way, "bare", "seconds", _difference) for way in ways},
        "placed_stage_s": _middle(done, "placed", "worker", "seconds", _difference) / STAGES,
        "placed_5_percent_s": max(0.0, placed_s / SHARE),
        "unchanged_flow_s": _median(done["inline"], "again_call_s"),
        "unchanged_worker_s": _median(done["worker"], "again_s"),
        "unchanged_placed_s": _median(done["placed"], "again_s"),
    }


def _share(one: float, other: float) -> float:
    return one / other - 1


def _difference(one: float, other: float) -> float:
    return one - other


def _median(laps: list[Lap], figure: str) -> float:
    return statistics.median(getattr(lap, figure) for lap in laps)


def _middle(done: Laps, way: str, other: str, figure: str, compare: Callable[[float, float], float]) -> float:
    pairs = zip(done[way], done[other], strict=True)
    return statistics.median(compare(getattr(one, figure), getattr(two, figure)) for one, two in pairs)


def table(done: Laps) -> list[str]:
    lines = [f"  {'':<14}{'seconds':>10}{'overhead':>22}{'nothing changed':>18}"]
    for way in WAYS:
        lines += _row(way, done, way, "seconds", "again_s")
        if way in ("bare", "inline"):
            lines += _row(f"{way}, call", done, way, "call_s", "again_call_s")
    return [*lines, ""]


def _row(label: str, done: Laps, way: str, figure: str, again: str) -> list[str]:
    head = f"  {label:<14}{_median(done[way], figure):>8.1f} s"
    if way == "bare":
        return [head]
    difference, share = (_middle(done, way, "bare", figure, compare) for compare in (_difference, _share))
    return [f"{head}{difference:>10.1f} s{share:>10.1%}{_median(done[way], again):>16.1f} s"]


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


def write_pipeline(folder: Path, *, rows: int, epochs: int, seed: int) -> Path:
    """Writes a spec and a table with unique rows."""
    folder.mkdir(parents=True)
    chance = np.random.default_rng(seed)
    columns: dict[str, Any] = {f"x{index}": chance.normal(size=rows).astype(np.float32) for index in range(8)}
    columns |= {f"c{index}": chance.integers(0, 500, rows) for index in range(3)}
    score = columns["x0"] - columns["x1"] + columns["c0"] / 250 + chance.normal(size=rows)
    pq.write_table(pa.table({**columns, "y": score > 1}), folder / "table.parquet")
    spec = {
        "name": MODEL,
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
