"""The ETL benchmark: from Parquet to shards, against polars, duckdb, hand-written dask + pandas, and the limit."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.child import Child, ContenderFailed
from benchmarks.etl.cases import DATA, ROOT, Case, prepare_cases
from benchmarks.etl.outputs import check_equal, output_bytes, read_outputs
from benchmarks.machine import machine
from benchmarks.race import EVERYTHING, MIN_REPETITIONS, Choice, Lap, Result, Role, race
from benchmarks.report import Report
from serin.machine.durable import sync
from serin.machine.hardware import core_count

PEERS = ROOT / ".venv-bench" / "bin" / "python"
CONTENDERS: dict[str, tuple[Role, str]] = {
    "ours": ("ours", "benchmarks.etl.ours"),
    "polars": ("peer", "benchmarks.etl.polars_peer"),
    "duckdb": ("peer", "benchmarks.etl.duckdb_peer"),
    "dask": ("peer", "benchmarks.etl.dask_peer"),
    "limit": ("limit", "benchmarks.etl.limit"),
}
SLOW = ("dask",)  # seconds for a lap: in every third round of a quick run
_SYNCS_AT_ONCE = 16  # as ours


def measure(*, full: bool, say: Callable[[str], None], choice: Choice = EVERYTHING) -> Report:
    contenders = choice.of(CONTENDERS)
    if not PEERS.exists() and any(role == "peer" for role, _ in contenders.values()):
        raise ContenderFailed("the peers' environment is missing; run: make bench-setup")
    cases, notes = prepare_cases(full=full, peers=PEERS, choice=choice, say=say)
    results: dict[str, dict[str, Result]] = {}
    versions: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(dir=DATA) as scratch:
        for case in cases:
            say(f"case {case.name}")
            results[case.name] = _race(
                case,
                contenders,
                Path(scratch),
                versions,
                repetitions=max(choice.repetitions, 11 if full else MIN_REPETITIONS),
                limit_times=choice.limit_times,
                rare=() if full else SLOW,
                say=say,
            )
    return Report(
        benchmark="etl",
        mode="full" if full else "quick",
        environment={"machine": machine(), "threads": core_count(), "versions": versions},
        cases=results,
        line=key_figures(results),
        notes=notes,
    )


def _race(
    case: Case,
    contenders: Mapping[str, tuple[Role, str]],
    scratch: Path,
    versions: dict[str, dict[str, str]],
    *,
    repetitions: int,
    limit_times: int,
    rare: tuple[str, ...],
    say: Callable[[str], None],
) -> dict[str, Result]:
    size = 0
    reference: dict[str, Any] = {}

    def request(name: str, turn: int) -> Mapping[str, Any]:
        os.sync()  # nobody waits for bytes that another one wrote or removed
        return {
            "case": case.request,
            "decode": {file: case.columns_of(file) for file in case.files},
            "threads": core_count(),
            "out": str(scratch / f"{case.name}-{name}-{turn}"),
            "output_bytes": size,
            "limit_times": limit_times,
        }

    def accept(name: str, asked: Mapping[str, Any], lap: Lap) -> None:
        nonlocal size, reference
        lap.answer["sync_s"] = _sync_s(Path(asked["out"]))
        if name != "limit":
            found = read_outputs(lap.answer)
            if not reference:  # ours comes first in the first round
                reference, size = found, output_bytes(Path(lap.answer["path"]))
            check_equal(f"{case.name}: {name}", found, reference, case.numeric)
        shutil.rmtree(asked["out"])

    with contextlib.ExitStack() as stack:
        runners = {}
        for name, (role, module) in contenders.items():
            python = str(PEERS) if role == "peer" else sys.executable
            child = stack.enter_context(Child(module, python=python, threads=core_count()))
            versions[name] = child.versions
            runners[name] = (role, child)
        return race(runners, request, accept, repetitions=repetitions, rare=rare, say=say)


def _sync_s(out: Path) -> float:
    """Brings all that a contender wrote to the disk; the seconds that took. Ours has done it in its time."""
    began = time.perf_counter()
    with ThreadPoolExecutor(_SYNCS_AT_ONCE) as threads:
        list(threads.map(sync, [*out.rglob("*"), out, out.parent]))
    return time.perf_counter() - began


def _durable(found: Result, ours: Result) -> float:
    """As `times_as_long_as`, with the time that it takes to bring the other's files to the disk."""
    laps = zip(found.laps, ours.laps, strict=True)
    return statistics.median((lap.seconds + lap.answer["sync_s"]) / own.seconds for lap, own in laps)


def key_figures(results: Mapping[str, Mapping[str, Result]]) -> dict[str, float]:
    """Returns each peer's time over ours: per case for polars, else the smallest over the cases; and the limit's."""
    line: dict[str, float] = {}
    for name in ("polars", "limit"):
        for case, found in results.items():
            if name in found:
                line[f"{name}_{case}"] = found[name].times_as_long_as(found["ours"])
                line[f"{name}_{case}_durable"] = _durable(found[name], found["ours"])
    for name in ("dask", "duckdb", "limit"):
        ratios = [case[name].times_as_long_as(case["ours"]) for case in results.values() if name in case]
        if ratios:
            line[name] = min(ratios)
    limits = [lap.answer["memory_limit_bytes"] for case in results.values() for lap in case["ours"].laps]
    line["peak_memory"] = max(case["ours"].peak_bytes for case in results.values()) / min(limits)
    return line
