"""Runs the contenders of the quality benchmark, one after the other or side by side, each on its share of cores."""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.child import Child, ContenderFailed
from benchmarks.quality.data_sets import DataSet
from benchmarks.quality.learners import LEARNERS

AUTO, NETWORK = "serin auto", "serin network"
SEED = 1
_MANY_ROWS, _MORE = 100_000, 4
_PATIENCE = 3  # times the budget: then a contender is ended, and has no figure for this data set
_LEAST_S = 120.0
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # they have cores alone; XGBoost for GPUs looks for one otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """`budget`: seconds for each contender on a data set, and four times as many where it has more than 100,000 rows.
    `jobs`: contenders that run at the same time."""

    budget: float
    jobs: int
    peers: Path
    contenders: tuple[str, ...] = (AUTO, *LEARNERS)

    def budget_for(self, data: DataSet) -> float:
        return self.budget * (_MORE if data.rows > _MANY_ROWS else 1)


@dataclass(slots=True)
class Outcome:
    """Scores and details by data set and contender. `missing`: reasons of contenders that gave none."""

    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def hold(contest: Contest, sets: Sequence[DataSet], done: Callable[[Outcome, DataSet, str], None]) -> Outcome:
    """Runs every contender on every data set; calls `done` after each."""
    outcome = Outcome(scores={each.name: {} for each in sets}, details={each.name: {} for each in sets})
    free: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for cores in share_cores(contest.jobs):
        free.put(cores)
    stop, live = threading.Event(), set[Child]()

    def one(data: DataSet, name: str) -> tuple[DataSet, str, dict[str, Any] | str]:
        if stop.is_set():
            return data, name, "stopped"
        cores = free.get()
        try:
            return data, name, _run(contest, data, name, cores, outcome, live)
        except ContenderFailed as error:
            return data, name, str(error)
        finally:
            free.put(cores)

    # Large data sets first: what takes longest must not begin last.
    order = [
        (data, name) for data in sorted(sets, key=lambda each: -each.rows) for name in contest.contenders
    ]
    with ThreadPoolExecutor(contest.jobs) as pool:
        try:
            for future in as_completed([pool.submit(one, *pair) for pair in order]):
                data, name, found = future.result()
                _enter(outcome, data.name, name, found)
                done(outcome, data, name)
        finally:  # also when the run is stopped: contenders end with it
            stop.set()
            for child in tuple(live):
                child.kill()
    return outcome


def share_cores(jobs: int) -> list[set[int]]:
    """Returns a set of cores for each job, of equal sizes; with fewer cores than jobs they share them."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // jobs)
    return [{cores[(number * each + at) % len(cores)] for at in range(each)} for number in range(jobs)]


def _run(
    contest: Contest, data: DataSet, name: str, cores: set[int], outcome: Outcome, live: set[Child]
) -> dict[str, Any]:
    ours = name == AUTO
    module = "benchmarks.quality.ours_auto" if ours else "benchmarks.quality.peer"
    python = sys.executable if ours else str(contest.peers)
    request = {
        "dataset": data.folder, "task": data.task, "budget": contest.budget_for(data), "seed": SEED,
        "threads": len(cores), "cores": sorted(cores), "name": name,
    }  # fmt: skip
    with Child(module, python=python, threads=len(cores), environment=_NO_GPU) as child:
        outcome.versions[name] = child.versions
        limit = threading.Timer(max(_LEAST_S, _PATIENCE * contest.budget_for(data)), child.kill)
        limit.start()
        live.add(child)
        try:
            lap = child.run(request)
        finally:
            limit.cancel()
            live.discard(child)
    return {**lap.answer, "seconds": lap.seconds, "peak_bytes": lap.peak_bytes}


def _enter(outcome: Outcome, data: str, name: str, found: dict[str, Any] | str) -> None:
    if isinstance(found, str) or "missing" in found:
        reason = found if isinstance(found, str) else found["missing"]
        outcome.missing[f"{name} on {data}"] = cause(reason)
        return
    outcome.scores[data][name] = found["test"]
    outcome.details[data][name] = found
    if "network_test" in found:
        outcome.scores[data][NETWORK] = found["network_test"]


def cause(reason: str) -> str:
    """Returns the line of a failed contender's output that says why; a stack of native code may follow it."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines[:1])[-1]
