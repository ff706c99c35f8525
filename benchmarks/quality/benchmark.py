"""The quality benchmark: a table of test metrics over data sets, `model.kind: auto` beside the packages of the field.

Every contender has the same time on the same cores and the same features. Peers try their defaults and then drawn
settings, `auto` its candidates. Only train and valid rows choose and stop early; the test rows are scored once.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, ContenderFailed
from benchmarks.machine import machine
from benchmarks.quality.contest import AUTO, NETWORK, Contest, Outcome, hold, share_cores
from benchmarks.quality.data_sets import DataSet, prepare
from benchmarks.quality.learners import LEARNERS, NETWORKS, TREES
from benchmarks.report import Report

PEERS = ROOT / ".venv-bench" / "bin" / "python"
CHOSEN = Path(__file__).parent / "chosen.json"  # of choose.py, for the settings of examples/flights
BUDGET_S = {"quick": 10.0, "full": 60.0}


def measure(
    *,
    full: bool,
    say: Callable[[str], None],
    only: tuple[str, ...] = (),
    budget: float | None = None,
    jobs: int = 1,
    peers: Path = PEERS,
    partial: Path | None = None,
) -> Report:
    """`only`: the data sets to take instead of all. `jobs`: contenders side by side, each with its share of the cores.
    `partial`: a file that gets the scores so far after each contender."""
    if not peers.exists():
        raise ContenderFailed("the peers' environment is missing; run: make bench-setup")
    mode = "full" if full else "quick"
    names = (AUTO, *(name for name in LEARNERS if full or name not in NETWORKS))
    contest = Contest(budget=budget or BUDGET_S[mode], jobs=jobs, peers=peers, contenders=names)

    def done(outcome: Outcome, data: DataSet, name: str) -> None:
        value = outcome.scores[data.name].get(name)
        say(f"{data.name}, {name}: " + ("no figure" if value is None else f"{value:.4f}"))
        if partial is not None:
            partial.write_text(json.dumps({**_figures(outcome, contest), "missing": outcome.missing}))

    with tempfile.TemporaryDirectory() as scratch:
        sets, notes = prepare(Path(scratch), full=full, peers=peers, say=say, only=only)
        outcome = hold(contest, sets, done)
    scores = {name: found for name, found in outcome.scores.items() if AUTO in found}
    return Report(
        benchmark="quality",
        mode=mode,
        environment={
            "machine": machine(),
            "threads": len(share_cores(jobs)[0]),
            "jobs": jobs,
            "versions": outcome.versions,
        },
        cases={},
        line=summary(scores),
        notes=[*notes, *(f"{name} was left out: {why}" for name, why in outcome.missing.items())],
        tables=show_table(scores, {each.name: each.metric for each in sets}),
        figures=_figures(outcome, contest),
    )


def _figures(outcome: Outcome, contest: Contest) -> dict[str, Any]:
    return {"scores": outcome.scores, "details": outcome.details, "budget": contest.budget}


def mean_ranks(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean rank of each contender over the data sets, 1 for the best. A contender without a figure on a data set
    has the last rank there. Our best network is part of `auto` and is not ranked beside it."""
    names = dict.fromkeys(name for found in scores.values() for name in found if name != NETWORK)
    ranks: dict[str, list[float]] = {}
    for found in scores.values():
        ranked = {name: found.get(name, float("-inf")) for name in names}
        for name, value in ranked.items():
            above = sum(other > value for other in ranked.values())
            equal = sum(other == value for other in ranked.values())
            ranks.setdefault(name, []).append(above + (equal + 1) / 2)
    return {name: statistics.mean(each) for name, each in ranks.items()}


def summary(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    ranks = mean_ranks(scores)
    if AUTO not in ranks:
        return {}
    other = min((rank for name, rank in ranks.items() if name != AUTO), default=float("nan"))
    line = {"rank_auto": ranks[AUTO], "rank_best_other": other, "rank_behind": ranks[AUTO] - other}
    both = [found for found in scores.values() if NETWORK in found and set(TREES) & set(found)]
    if both:
        line["network_gap"] = statistics.mean(_best_trees(found) - found[NETWORK] for found in both)
    if set(TREES) & set(scores.get("flights", {})):
        line["auc_gap"] = _best_trees(scores["flights"]) - scores["flights"][AUTO]
    return line


def _best_trees(found: Mapping[str, float]) -> float:
    return max(found[name] for name in TREES if name in found)


def show_table(scores: Mapping[str, Mapping[str, float]], metrics: Mapping[str, str]) -> list[str]:
    known = {name for found in scores.values() for name in found}
    names = [name for name in (AUTO, NETWORK, *LEARNERS) if name in known]
    head = f"  {'data set':<16}{'metric':<10}" + "".join(f"{name:>15}" for name in names)
    lines = [head]
    for data, found in scores.items():
        cells = "".join(f"{found[name]:>15.4f}" if name in found else f"{'-':>15}" for name in names)
        lines.append(f"  {data:<16}{metrics[data]:<10}{cells}")
    ranks = mean_ranks(scores)
    cells = "".join(f"{ranks[name]:>15.2f}" if name in ranks else f"{'':>15}" for name in names)
    return [*lines, f"  {'mean rank':<26}{cells}", ""]
