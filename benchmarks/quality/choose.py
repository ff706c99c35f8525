"""Chooses each contender's settings with the same effort: python -m benchmarks.quality.choose [--trials N] [--out
FILE].

All use the same sampler (TPE) with the same number of trials, on the same four blocks of time inside the train and
valid rows of the flights. A trial that falls behind the median of earlier ones is stopped. No test row is read. The
chosen settings and every trial are written to chosen.json, which `python -m benchmarks quality` reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna

from benchmarks.child import Child
from benchmarks.machine import machine
from benchmarks.quality.benchmark import CHOSEN, PEERS
from benchmarks.quality.folds import make_folds
from benchmarks.quality.spaces import CONTENDERS, Contender
from serin.machine.hardware import core_count

FOLDS = 4
SEED = 1
SURE_TRIALS = 4  # trials that are never stopped, so that there is a median


def choose(contender: Contender, folds: list[str], trials: int, *, threads: int, gpu: bool) -> dict[str, Any]:
    """Returns the settings with the best mean AUC over the blocks, and the result of every trial."""
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=SEED, n_startup_trials=trials // 2),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=SURE_TRIALS),
    )
    began, records = time.monotonic(), []
    python = sys.executable if contender.role == "ours" else str(PEERS)
    with Child(contender.module, python=python, threads=threads) as child:
        versions = child.versions
        for number in range(trials):
            trial = study.ask()
            settings = contender.suggest(trial)
            found: list[float] = []
            given_up = False
            for fold in folds:
                request = {
                    "dataset": fold, "settings": settings, "seed": SEED, "threads": threads, "test": False,
                    "gpu": gpu and contender.role == "ours",
                }  # fmt: skip
                found.append(child.run(request).answer["valid_auc"])
                trial.report(statistics.mean(found), len(found))
                given_up = len(found) < len(folds) and trial.should_prune()
                if given_up:
                    break
            state = optuna.trial.TrialState.PRUNED if given_up else optuna.trial.TrialState.COMPLETE
            study.tell(trial, None if given_up else statistics.mean(found), state=state)
            records.append({"settings": settings, "auc": found})
            print(f"{contender.module} {number + 1}/{trials} {found} {settings}", file=sys.stderr, flush=True)
    best = max((one for one in records if len(one["auc"]) == len(folds)), key=lambda one: sum(one["auc"]))
    return {
        "settings": best["settings"], "mean_auc": statistics.mean(best["auc"]), "trials": records,
        "seconds": round(time.monotonic() - began, 1), "versions": versions,
        "machine": {name: value for name, value in machine().items() if name in ("cpu", "cores", "gpus")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--threads", type=int, default=core_count())
    parser.add_argument("--gpu", action="store_true", help="train Serin on the first GPU")
    parser.add_argument(
        "--folds", type=Path, help="a JSON list of datasets of the blocks, from an earlier run"
    )
    parser.add_argument("--only", choices=sorted(CONTENDERS), help="choose for this contender only")
    parser.add_argument("--out", type=Path, default=CHOSEN)
    asked = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    chosen: dict[str, Any] = {}
    if asked.only and asked.out.exists():
        chosen = json.loads(asked.out.read_text())["contenders"]
    with tempfile.TemporaryDirectory() as scratch:
        made = json.loads(asked.folds.read_text()) if asked.folds else None
        folds = made or make_folds(Path(scratch), FOLDS)
        for name, contender in CONTENDERS.items():
            if asked.only in (None, name):
                chosen[name] = choose(contender, folds, asked.trials, threads=asked.threads, gpu=asked.gpu)
    document = {
        "format": "serin.benchmark.chosen", "version": 1, "folds": FOLDS, "seed": SEED, "contenders": chosen,
    }  # fmt: skip
    asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
