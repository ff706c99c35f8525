"""A stack for the benchmarks of orchestration, the four ways to run a pipeline beside it, and the pipelines."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.child import ContenderFailed
from serin.store.store import Store

Say = Callable[[str], None]
ROOT = Path(__file__).resolve().parents[2]
MODEL = "orchestrated"
NETWORK: Mapping[str, Any] = {"kind": "dcn", "hidden": [128, 64]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """One pipeline, run one way."""

    seconds: float  # of the whole command
    call_s: float  # of the stages or the flow alone, where they run in the command's own process; else nan
    cpu_s: float  # of the command and the processes it waited for; incomplete for the others
    again_s: float  # the whole command, nothing changed
    again_call_s: float


class Place:
    """A stack in its own folder, and the four ways to run a spec."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SERIN_HOME": str(folder / "home"), **variables}

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


@contextmanager
def stack_in(folder: Path, say: Say, **variables: str) -> Iterator[Place]:
    place = Place(folder, **variables)
    say("starting a stack")
    place.run("serin.cli", "up")
    try:
        place.connect()
        yield place
    finally:
        place.run("serin.cli", "down")


def write_pipeline(
    folder: Path, *, rows: int, epochs: int, seed: int, model: Mapping[str, Any] = NETWORK
) -> Path:
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
        "model": dict(model),
        "training": {"epochs": epochs, "batch_rows": 4096, "seed": 3} if "hidden" in model else {"seed": 3},
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path
