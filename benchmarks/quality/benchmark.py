"""The quality benchmark: a table of test metrics over data sets, `model.kind: auto` beside the packages of the field.

Every contender may try the same number of settings on the same features: peers their defaults and drawn ones, `auto`
its candidates. Only the valid rows choose and stop early; the test rows are scored once, by what was chosen.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child, ContenderFailed
from benchmarks.machine import machine
from benchmarks.quality.data_sets import DataSet, prepare
from benchmarks.quality.learners import LEARNERS, TREES
from benchmarks.report import Report
from serin.machine.hardware import core_count

PEERS = ROOT / ".venv-bench" / "bin" / "python"
CHOSEN = Path(__file__).parent / "chosen.json"  # of choose.py, for the settings of examples/flights
TRIALS = {"quick": 2, "full": 6}
SEED = 1
AUTO, NETWORK = "serin auto", "serin network"
Scores = dict[str, dict[str, float]]
"""Data set -> contender -> test metric."""


def measure(
    *, full: bool, say: Callable[[str], None], only: tuple[str, ...] = (), trials: int | None = None
) -> Report:
    """`only`: the data sets to take instead of all, and `trials` the settings each contender may try."""
    if not PEERS.exists():
        raise ContenderFailed("the peers' environment is missing; run: make bench-setup")
    mode = "full" if full else "quick"
    allowed = trials or TRIALS[mode]
    scores: Scores = {}
    details: dict[str, Any] = {}
    versions: dict[str, dict[str, str]] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        sets, notes = prepare(Path(scratch), full=full, peers=PEERS, say=say, only=only)
        for each in sets:
            scores[each.name], details[each.name] = _train_all(each, allowed, versions, missing)
            say(f"{each.name}: " + ", ".join(f"{name} {v:.4f}" for name, v in scores[each.name].items()))
    return Report(
        benchmark="quality",
        mode=mode,
        environment={"machine": machine(), "threads": core_count(), "versions": versions},
        cases={},
        line=summary(scores),
        notes=[*notes, *(f"{name} was left out: {why}" for name, why in missing.items())],
        tables=show_table(scores, {each.name: each.metric for each in sets}),
        figures={"scores": scores, "details": details, "trials": allowed},
    )


def _train_all(
    data: DataSet, trials: int, versions: dict[str, dict[str, str]], missing: dict[str, str]
) -> tuple[dict[str, float], dict[str, Any]]:
    found: dict[str, float] = {}
    details: dict[str, Any] = {}
    common = {
        "dataset": data.folder, "task": data.task, "trials": trials, "seed": SEED, "threads": core_count(),
    }  # fmt: skip
    with Child("benchmarks.quality.ours_auto", python=sys.executable, threads=core_count()) as child:
        lap = child.run(common)
        found[AUTO] = lap.answer["test"]
        if "network_test" in lap.answer:
            found[NETWORK] = lap.answer["network_test"]
        versions[AUTO], details[AUTO] = child.versions, {**lap.answer, "seconds": lap.seconds}
    for name in LEARNERS:
        if name in missing:
            continue
        with Child("benchmarks.quality.peer", python=str(PEERS), threads=core_count()) as child:
            lap = child.run({**common, "name": name})
            versions[name] = child.versions
        if "missing" in lap.answer:
            missing[name] = lap.answer["missing"]
            continue
        found[name], details[name] = lap.answer["test"], {**lap.answer, "seconds": lap.seconds}
    return found, details


def mean_ranks(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean rank of each contender over the data sets, 1 for the best. Our best network is part of `auto` and is
    not ranked beside it."""
    ranks: dict[str, list[float]] = {}
    for found in scores.values():
        ranked = {name: value for name, value in found.items() if name != NETWORK}
        for name, value in ranked.items():
            above = sum(other > value for other in ranked.values())
            equal = sum(other == value for other in ranked.values())
            ranks.setdefault(name, []).append(above + (equal + 1) / 2)
    return {name: statistics.mean(each) for name, each in ranks.items()}


def summary(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    ranks = mean_ranks(scores)
    other = min((rank for name, rank in ranks.items() if name != AUTO), default=float("nan"))
    line = {"rank_auto": ranks[AUTO], "rank_best_other": other, "rank_behind": ranks[AUTO] - other}
    gaps = [_best_trees(found) - found[NETWORK] for found in scores.values() if NETWORK in found]
    if gaps:
        line["network_gap"] = statistics.mean(gaps)
    if "flights" in scores:
        line["auc_gap"] = _best_trees(scores["flights"]) - scores["flights"][AUTO]
    return line


def _best_trees(found: Mapping[str, float]) -> float:
    return max(found[name] for name in TREES if name in found)


def show_table(scores: Mapping[str, Mapping[str, float]], metrics: Mapping[str, str]) -> list[str]:
    names = list(dict.fromkeys(name for found in scores.values() for name in found))
    head = f"  {'data set':<16}{'metric':<10}" + "".join(f"{name:>15}" for name in names)
    lines = [head]
    for data, found in scores.items():
        cells = "".join(f"{found[name]:>15.4f}" if name in found else f"{'-':>15}" for name in names)
        lines.append(f"  {data:<16}{metrics[data]:<10}{cells}")
    ranks = mean_ranks(scores)
    cells = "".join(f"{ranks[name]:>15.2f}" if name in ranks else f"{'':>15}" for name in names)
    return [*lines, f"  {'mean rank':<26}{cells}", ""]
