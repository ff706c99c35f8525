"""The training benchmark: samples per second of whole steps with loading, against hand-written loops and Lightning."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child
from benchmarks.machine import machine
from benchmarks.race import EVERYTHING, Choice, Lap, Result, Role, Unequal, race
from benchmarks.report import Report
from benchmarks.training.table import make_table

PEERS = ROOT / ".venv-bench" / "bin" / "python"
# Rows of the table by rows per step: enough steps for timing, and a quick run within two minutes on two cores, or
# within one on a GPU.
ROWS = {
    "quick": {1024: 2**15, 8192: 2**16},
    "full": {1024: 2**16, 8192: 2**18, 65536: 2**18},
    "gpu": {8192: 2**21, 65536: 2**21},
    "gpu, full": {1024: 2**21, 8192: 2**22, 65536: 2**22},
}
KINDS = ("mlp", "dcn")
QUICK_ON_GPU = (("mlp", 8192), ("dcn", 65536))
LOSS_TOLERANCE = 0.05  # initial weights and row order differ


def measure(*, full: bool, say: Callable[[str], None], choice: Choice = EVERYTHING) -> Report:
    gpu = bool(machine()["gpus"])
    rows = ROWS[("gpu, full" if full else "gpu") if gpu else "full" if full else "quick"]
    rows = {batch_rows: int(count * choice.times_the_data) for batch_rows, count in rows.items()}
    results: dict[str, dict[str, Result]] = {}
    versions: dict[str, dict[str, str]] = {}
    notes = []
    contenders: dict[str, tuple[Role, str, str]] = {
        "ours": ("ours", "benchmarks.training.ours", sys.executable),
        "eager": ("peer", "benchmarks.training.eager_peer", sys.executable),
        "lightning": ("peer", "benchmarks.training.lightning_peer", str(PEERS)),
        "limit": ("limit", "benchmarks.training.limit", sys.executable),
    }
    contenders = choice.of(contenders)
    if "lightning" in contenders and not PEERS.exists():
        del contenders["lightning"]
        notes.append("without Lightning: the environment of the peers is missing (make bench-setup)")
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        tables = {count: Path(scratch) / f"table-{count}" for count in set(rows.values())}
        for count, table in tables.items():
            make_table(table, count)
        runners = {}
        for name, (role, module, python) in contenders.items():
            child = stack.enter_context(Child(module, python=python, threads=choice.cores))
            versions[name] = child.versions
            runners[name] = (role, child)
        cases = QUICK_ON_GPU if gpu and not full else [(kind, size) for kind in KINDS for size in rows]
        for kind, batch_rows in cases:
            if not choice.has_case(f"{kind}_{batch_rows}"):
                continue
            say(f"{kind}, {batch_rows} rows per step")
            request = {
                "table": str(tables[rows[batch_rows]]), "kind": kind, "batch_rows": batch_rows,
                "threads": choice.cores, "hidden": [512, 256] if gpu or full else [128, 64], "rate": 0.003,
                "epochs": 2 if gpu and batch_rows == 65536 else 1, "precision": "tf32" if gpu else "fp32",
            }  # fmt: skip
            results[f"{kind}_{batch_rows}"] = _race(runners, request, choice.repetitions, say)
    notes += [
        f"{case}: our step was {found['ours'].laps[-1].answer['step']} ({found['ours'].laps[-1].answer['reason']})"
        for case, found in results.items()
    ]
    return Report(
        benchmark="training",
        mode="full" if full else "quick",
        environment={"machine": machine(), "threads": choice.cores, "versions": versions, "rows": rows},
        cases=results,
        line=key_figures(results),
        notes=notes,
    )


def _race(
    runners: Mapping[str, Any],
    request: Mapping[str, Any],
    repetitions: int,
    say: Callable[[str], None],
) -> dict[str, Result]:
    reference: list[float] = []

    def accept(name: str, _asked: Mapping[str, Any], lap: Lap) -> None:
        if name == "limit":
            return
        reference.append(lap.answer["loss"])
        if not math.isclose(lap.answer["loss"], reference[0], rel_tol=LOSS_TOLERANCE):
            raise Unequal(f"{name} ended with loss {lap.answer['loss']:.4f}, another with {reference[0]:.4f}")

    return race(runners, lambda _name, _turn: request, accept, repetitions=repetitions, say=say)


def key_figures(results: Mapping[str, Mapping[str, Result]]) -> dict[str, float]:
    """Returns geometric means over the cases of speed over a peer's and of the share of the limit; the worst over
    eager."""
    line: dict[str, float] = {}
    for name in ("eager", "lightning", "limit"):
        ratios = [case[name].times_as_long_as(case["ours"]) for case in results.values() if name in case]
        if ratios:
            line[name] = statistics.geometric_mean(ratios)
    line["worst"] = min(case["eager"].times_as_long_as(case["ours"]) for case in results.values())
    shares = {name: [lap.answer["mfu"] for lap in case["ours"].laps] for name, case in results.items()}
    return line | {f"mfu_{name}": statistics.median(own) for name, own in shares.items() if None not in own}
