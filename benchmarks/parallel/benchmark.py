"""The parallel benchmark: two processes over gloo, against a hand-written torchrun loop and a rank without
communication.

On a GPU: the cost of a process group of one with NCCL.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.child import Child
from benchmarks.machine import machine
from benchmarks.race import Lap, Result, Role, Unequal, race
from benchmarks.report import Report
from benchmarks.training.table import make_table

CONTENDERS: dict[str, tuple[Role, str]] = {
    "ours": ("ours", "benchmarks.parallel.ours"),
    "ddp": ("peer", "benchmarks.parallel.raw_peer"),
    "alone": ("limit", "benchmarks.parallel.alone"),
}
LOSS_TOLERANCE = 0.05  # initial weights and row order differ


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    gpu = bool(machine()["gpus"])
    rows = 2**21 if gpu else 2**18 if full else 2**16
    cases = {"mlp_8192": ("mlp", 8192)} if gpu else {"mlp_2048": ("mlp", 2048)}
    if full and gpu:
        cases |= {"mlp_65536": ("mlp", 65536)}
    elif full:
        cases |= {"mlp_8192": ("mlp", 8192), "dcn_2048": ("dcn", 2048)}
    results: dict[str, dict[str, Result]] = {}
    versions: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        table, half = Path(scratch) / "table", Path(scratch) / "half"
        make_table(table, rows)
        make_table(half, rows // 2)
        runners = {}
        for name, (role, module) in CONTENDERS.items():
            child = stack.enter_context(Child(module, python=sys.executable, threads=1))
            versions[name] = child.versions
            runners[name] = (role, child)
        for case, (kind, batch_rows) in cases.items():
            say(case)
            request = {
                "table": str(table), "half": str(half), "kind": kind, "batch_rows": batch_rows, "threads": 1,
                "hidden": [512, 256] if gpu else [128, 64], "epochs": 2 if gpu else 1, "rate": 0.003,
                "precision": "tf32" if gpu else "fp32",
            }  # fmt: skip
            results[case] = _race(runners, request)
    return Report(
        benchmark="parallel",
        mode="full" if full else "quick",
        environment={
            "machine": machine(),
            "ranks": 1 if gpu else 2,
            "versions": versions,
            "rows": rows,
        },
        cases=results,
        line=key_figures(results, gpu=gpu),
        notes=[]
        if gpu
        else ["'alone' is one process with half of the rows: twice its speed is the limit for two"],
    )


def _race(runners: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Result]:
    reference: list[float] = []

    def accept(name: str, _asked: Mapping[str, Any], lap: Lap) -> None:
        if lap.answer["loss"] is None:
            return
        reference.append(lap.answer["loss"])
        if not math.isclose(lap.answer["loss"], reference[0], rel_tol=LOSS_TOLERANCE):
            raise Unequal(f"{name} ended with loss {lap.answer['loss']:.4f}, another with {reference[0]:.4f}")

    return race(runners, lambda _name, _turn: request, accept)


def key_figures(results: Mapping[str, Mapping[str, Result]], *, gpu: bool) -> dict[str, float]:
    """Returns the smallest over the cases: the raw loop's time over ours, and the speed-up over one process or NCCL's
    tax."""
    line = {"ddp": min(case["ddp"].times_as_long_as(case["ours"]) for case in results.values())}
    share = min(case["alone"].times_as_long_as(case["ours"]) for case in results.values())
    return {**line, "tax": 1 - share} if gpu else {**line, "speedup": 2 * share}
