"""Simulated rollouts: how often a good candidate is blamed and how soon a bad one is caught, by us and by others."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.machine import cores, machine
from benchmarks.report import Report
from benchmarks.rollout.scenarios import HORIZON_S, NULLS, WORSE, Scenario
from benchmarks.rollout.simulate import ALPHA, Cell, simulate

RATES = (20, 100, 500)
QUICK_RUNS, QUICK_HORIZON_S = 200, 900
FULL_RUNS, PER_CELL = 2000, 500  # a cell is simulated in parts, so that its arrays stay in the cache
JUDGES = ("ours", "flagger", "kayenta", "per request")
HEADLINE = ("x1.5", 100)

Found = dict[tuple[str, int], dict[str, list[float]]]


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    found = run(cells(full=full), say=say)
    runs = FULL_RUNS if full else QUICK_RUNS
    return Report(
        benchmark="rollout",
        mode="full" if full else "quick",
        environment={
            "machine": machine(),
            "versions": {"numpy": np.__version__},
            "runs": runs,
            "alpha": ALPHA,
        },
        cases={},
        line=key_figures(found),
        notes=[
            f"{runs} rollouts per null at 10% of traffic (drift + ramp: 1 to 50%), margin 10%, alpha {ALPHA:g}",
            f"peers, and candidates that are worse: {min(runs, PER_CELL)} rollouts",
            "peers look at p95 alone; ours at p50, p95, p99, errors and promises together",
            "our seconds include the wait for late requests and for the log",
        ],
        tables=tables(found),
        figures={f"{name}, {rate}/s": figures(decided) for (name, rate), decided in found.items()},
    )


def cells(*, full: bool) -> list[Cell]:
    """A false rollback is rare and takes many rollouts to be counted; a median takes few."""
    if not full:
        return [_cell(scenario, 100, QUICK_RUNS, QUICK_HORIZON_S, 0) for scenario in (*NULLS, *WORSE)]
    parts = range(FULL_RUNS // PER_CELL)
    return [
        _cell(scenario, rate, PER_CELL, HORIZON_S, part)
        for part in parts
        for rate in reversed(RATES)
        for scenario in ((*NULLS, *WORSE) if part == 0 else NULLS)
    ]


def _cell(scenario: Scenario, rate: int, runs: int, horizon_s: int, seed: int) -> Cell:
    return Cell(
        scenario=scenario, requests_per_s=rate, runs=runs, horizon_s=horizon_s, seed=seed, peers=seed == 0
    )


def run(wanted: Sequence[Cell], *, say: Callable[[str], None]) -> Found:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    found: Found = {}
    begin = time.monotonic()
    with multiprocessing.Pool(cores()) as pool:  # ends its processes when it is left, also by an interrupt
        for done, (cell, part) in enumerate(pool.imap_unordered(_part, wanted), 1):
            decided = found.setdefault(
                (cell.scenario.name, cell.requests_per_s), {judge: [] for judge in JUDGES}
            )
            for judge, seconds in part.items():
                decided[judge] += seconds
            if done % 10 == 0 or done == len(wanted):
                say(f"{done} of {len(wanted)} parts, {time.monotonic() - begin:.0f} s")
    return found


def _part(cell: Cell) -> tuple[Cell, dict[str, list[float]]]:
    return cell, simulate(cell)


def figures(decided: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Per judge: the share that was rolled back, and quantiles of when."""
    return {judge: _figures(np.array(seconds)) for judge, seconds in decided.items()}


def _figures(seconds: Any) -> dict[str, Any]:
    back = np.isfinite(seconds)
    when = [float(value) for value in np.quantile(seconds, (0.1, 0.5, 0.9), method="higher")]
    return {
        "runs": len(seconds),
        "rolled_back": float(back.mean()),
        "p10_s, median_s, p90_s": [value if math.isfinite(value) else None for value in when],
    }


def key_figures(found: Found) -> dict[str, float]:
    nulls = {scenario.name for scenario in NULLS}
    false = max(np.isfinite(decided["ours"]).mean() for (name, _), decided in found.items() if name in nulls)
    medians = {judge: float(np.median(seconds)) for judge, seconds in found[HEADLINE].items()}
    return {
        "false_rollback": float(false),
        "sooner_than_kayenta": medians["kayenta"] / medians["ours"],
        "sooner_than_flagger": medians["flagger"] / medians["ours"],
    }


def tables(found: Found) -> list[str]:
    rates = sorted({rate for _, rate in found})
    false = _table("rolled back although no worse than allowed (share)", NULLS, rates, found, _share)
    caught = _table("rolled back when worse (median seconds)", WORSE, rates, found, _median)
    return [false, caught]


def _table(
    title: str,
    scenarios: Sequence[Scenario],
    rates: Sequence[int],
    found: Found,
    show: Callable[[Sequence[float]], str],
) -> str:
    lines = [
        f"rollout: {title}",
        f"  {'':<18}{'requests/s':>10}" + "".join(f"{judge:>13}" for judge in JUDGES),
    ]
    for scenario in scenarios:
        for rate in rates:
            decided = found[scenario.name, rate]
            row = "".join(f"{show(decided[judge]):>13}" for judge in JUDGES)
            lines.append(f"  {scenario.name:<18}{rate:>10}{row}")
    return "\n".join([*lines, ""])


def _share(seconds: Sequence[float]) -> str:
    return f"{np.isfinite(seconds).mean():.4f}"


def _median(seconds: Sequence[float]) -> str:
    median = float(np.median(seconds))
    return f"{median:.0f} s" if math.isfinite(median) else f"never ({np.isfinite(seconds).mean():.2f})"
