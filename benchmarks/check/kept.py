"""The committed ratios of one kind of machine: those of several runs, round by round."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.machine import machine

_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRatios:
    """One run."""

    date: str
    commit: str
    ratios: dict[str, list[float]]


def read_kept(path: Path) -> list[KeptRatios]:
    """Returns the runs of a file, the newest last; none where there is no file."""
    if not path.exists():
        return []
    return [KeptRatios(**run) for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]


def write_kept(path: Path, runs: Sequence[KeptRatios]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = [
        {**asdict(run), "ratios": {name: _rounded(rounds) for name, rounds in run.ratios.items()}}
        for run in runs
    ]
    found = machine()
    facts = {name: found[name] for name in ("cpu", "cores", "architecture")}
    document = {"format": "serin.benchmark-check", "version": 1, "machine": facts, "runs": rounded}
    path.write_text(json.dumps(document, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")


def newest(runs: Sequence[KeptRatios], count: int) -> list[KeptRatios]:
    """Returns the newest runs of each ratio: some runs have a few of them only."""
    left: Counter[str] = Counter()
    found = []
    for run in reversed(runs):
        ratios = {name: rounds for name, rounds in run.ratios.items() if left[name] < count}
        left.update(ratios.keys())
        if ratios:
            found.append(replace(run, ratios=ratios))
    return found[::-1]


def _rounded(rounds: Sequence[float]) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in rounds]
