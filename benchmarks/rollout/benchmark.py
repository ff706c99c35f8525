"""Simulates rollouts: how often a good candidate is rolled back and how soon a bad one is found, by Serin and its
peers."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.report import Report
from benchmarks.rollout.promotion import seconds_to_promote
from benchmarks.rollout.scenarios import HORIZON_S, LASTING, NULLS, PRICE, WORSE, Scenario
from benchmarks.rollout.simulate import ALPHA, Cell, simulate
from serin.machine.hardware import core_count

RATES = (20, 100, 500)
QUICK_RUNS, QUICK_HORIZON_S = 200, 900
FULL_RUNS, PER_CELL = 2000, 500  # a cell is simulated in parts, so that its arrays stay in the cache
JUDGES = ("ours", "flagger", "kayenta", "per request")
USUAL_RATE = 100
HEADLINE = ("x1.5", USUAL_RATE)

Found = dict[tuple[str, int], dict[str, list[float]]]


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    found = run(cells(full=full), say=say)
    runs = FULL_RUNS if full else QUICK_RUNS
    promoted = seconds_to_promote(runs=min(runs, PER_CELL))
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
        line=key_figures(found, promoted),
        notes=[
            f"{runs} rollouts per null at 10% of traffic (drift + ramp: 1 to 50%), margin 10%, alpha {ALPHA:g}",
            f"peers, candidates that are worse, lasting levels: {min(runs, PER_CELL)} rollouts",
            "lasting levels are not covered by the promise and not in false_rollback",
            "equal_s: median seconds of all steps of the default plan, without the bake",
            "peers use p95 alone; ours uses p50, p95, p99, errors and promises together",
            "our seconds include the wait for late requests and for the log",
        ],
        tables=tables(found),
        figures={f"{name}, {rate}/s": figures(decided) for (name, rate), decided in found.items()}
        | {f"promoted, {USUAL_RATE}/s": figures({"ours": promoted})},
    )


def cells(*, full: bool) -> list[Cell]:
    """Returns the cells to simulate. A false rollback is rare and needs many rollouts; a median needs few."""
    runs, horizon_s = (PER_CELL, HORIZON_S) if full else (QUICK_RUNS, QUICK_HORIZON_S)
    alone = [_cell(scenario, USUAL_RATE, runs, horizon_s, 0, peers=False) for scenario in (*LASTING, *PRICE)]
    if not full:
        return [*(_cell(scenario, USUAL_RATE, runs, horizon_s, 0) for scenario in (*NULLS, *WORSE)), *alone]
    parts = range(FULL_RUNS // PER_CELL)
    return [
        _cell(scenario, rate, runs, horizon_s, part, peers=part == 0)
        for part in parts
        for rate in reversed(RATES)
        for scenario in ((*NULLS, *WORSE) if part == 0 else NULLS)
    ] + alone


def _cell(scenario: Scenario, rate: int, runs: int, horizon_s: int, seed: int, *, peers: bool = True) -> Cell:
    return Cell(
        scenario=scenario, requests_per_s=rate, runs=runs, horizon_s=horizon_s, seed=seed, peers=peers
    )


def run(wanted: Sequence[Cell], *, say: Callable[[str], None]) -> Found:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    found: Found = {}
    begin = time.monotonic()
    with multiprocessing.Pool(core_count()) as pool:  # ends its processes on exit, also after an interrupt
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
    """Returns per judge the share that was rolled back, and quantiles of when."""
    return {judge: _figures(np.array(seconds)) for judge, seconds in decided.items() if seconds}


def _figures(seconds: Any) -> dict[str, Any]:
    back = np.isfinite(seconds)
    when = [float(value) for value in np.quantile(seconds, (0.1, 0.5, 0.9), method="higher")]
    return {
        "runs": len(seconds),
        "rolled_back": float(back.mean()),
        "p10_s, median_s, p90_s": [value if math.isfinite(value) else None for value in when],
    }


def key_figures(found: Found, promoted: Sequence[float]) -> dict[str, float]:
    nulls = {scenario.name for scenario in NULLS}
    false = max(np.isfinite(decided["ours"]).mean() for (name, _), decided in found.items() if name in nulls)
    medians = {judge: float(np.median(seconds)) for judge, seconds in found[HEADLINE].items()}
    return {
        "false_rollback": float(false),
        "sooner_than_kayenta": medians["kayenta"] / medians["ours"],
        "sooner_than_flagger": medians["flagger"] / medians["ours"],
        "equal_s": float(np.median(promoted)),
    }


def tables(found: Found) -> list[str]:
    rates = sorted({rate for _, rate in found})
    false = _table("rolled back although no worse than allowed (share)", NULLS, rates, found, _share)
    caught = _table("rolled back when worse (median seconds)", WORSE, rates, found, _median)
    usual = [USUAL_RATE]
    lasting = _table(
        "processes with levels that last, no worse than allowed (share)", LASTING, usual, found, _share
    )
    price = _table(
        "rolled back when worse, with a second opinion (median seconds)", PRICE, usual, found, _median
    )
    return [false, caught, lasting, price]


def _table(
    title: str,
    scenarios: Sequence[Scenario],
    rates: Sequence[int],
    found: Found,
    show: Callable[[Sequence[float]], str],
) -> str:
    lines = [
        f"rollout: {title}",
        f"  {'':<30}{'requests/s':>10}" + "".join(f"{judge:>13}" for judge in JUDGES),
    ]
    for scenario in scenarios:
        for rate in rates:
            decided = found[scenario.name, rate]
            row = "".join(f"{show(decided[judge]) if decided[judge] else '-':>13}" for judge in JUDGES)
            lines.append(f"  {scenario.name:<30}{rate:>10}{row}")
    return "\n".join([*lines, ""])


def _share(seconds: Sequence[float]) -> str:
    return f"{np.isfinite(seconds).mean():.4f}"


def _median(seconds: Sequence[float]) -> str:
    median = float(np.median(seconds))
    return f"{median:.0f} s" if math.isfinite(median) else f"never ({np.isfinite(seconds).mean():.2f})"
