"""The quality benchmark: AUC on the flights' test rows, against XGBoost and LightGBM on the same features.

Every contender trains with settings that were chosen with the same effort and without the test rows (choose.py wrote
them to chosen.json), with several seeds. The test rows are scored once for each seed.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.child import ROOT, Child, ContenderFailed
from benchmarks.machine import machine
from benchmarks.quality.folds import make_folds
from benchmarks.quality.rows import read_rows
from benchmarks.quality.spaces import CONTENDERS, Contender
from benchmarks.race import Lap, Result
from benchmarks.report import Report
from serin.machine.hardware import core_count
from serin.metrics import auc

PEERS = ROOT / ".venv-bench" / "bin" / "python"
CHOSEN = Path(__file__).parent / "chosen.json"
SEEDS = {"quick": (1, 2, 3), "full": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)}


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    """Compares the AUC of the contenders; their seconds are shown for information."""
    if not PEERS.exists():
        raise ContenderFailed("the peers' environment is missing; run: make bench-setup")
    chosen = json.loads(CHOSEN.read_text(encoding="utf-8"))["contenders"]
    mode = "full" if full else "quick"
    results: dict[str, Result] = {}
    versions: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        (dataset,) = make_folds(Path(scratch), 1)
        target = read_rows(dataset, "test")[1]
        for name, contender in CONTENDERS.items():
            laps, versions[name] = _train(contender, chosen[name]["settings"], dataset, target, SEEDS[mode])
            results[name] = Result(role=contender.role, laps=laps)
            say(f"{name}: {_figures(laps)}")
    means = {name: statistics.mean(_aucs(result.laps)) for name, result in results.items()}
    return Report(
        benchmark="quality",
        mode=mode,
        environment={"machine": machine(), "threads": core_count(), "versions": versions},
        cases={"flights": results},
        line={"auc_gap": max(means[name] for name in means if name != "ours") - means["ours"]},
        notes=[
            f"{name}: test {_figures(result.laps)}; {chosen[name]['mean_auc']:.4f} over the blocks it was chosen by"
            for name, result in results.items()
        ],
        figures={name: _aucs(result.laps) for name, result in results.items()},
    )


def _train(
    contender: Contender,
    settings: dict[str, Any],
    dataset: str,
    target: np.ndarray,
    seeds: tuple[int, ...],
) -> tuple[tuple[Lap, ...], dict[str, str]]:
    laps = []
    python = sys.executable if contender.role == "ours" else str(PEERS)
    with Child(contender.module, python=python, threads=core_count()) as child:
        for seed in seeds:
            request = {
                "dataset": dataset, "settings": settings, "seed": seed, "threads": core_count(), "test": True,
            }  # fmt: skip
            lap = child.run(request)
            scores = np.asarray(lap.answer.pop("scores"), np.float32)
            answer = {**lap.answer, "seed": seed, "auc": auc(target, scores)}
            laps.append(Lap(seconds=lap.seconds, peak_bytes=lap.peak_bytes, answer=answer))
        return tuple(laps), child.versions


def _aucs(laps: tuple[Lap, ...]) -> list[float]:
    return [lap.answer["auc"] for lap in laps]


def _figures(laps: tuple[Lap, ...]) -> str:
    found = _aucs(laps)
    return f"AUC {statistics.mean(found):.4f} ({min(found):.4f} to {max(found):.4f}, {len(found)} seeds)"
