"""The quality benchmark: AUC on the flights' test rows, against XGBoost and LightGBM on the same features."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.child import ROOT, Child, ContenderFailed
from benchmarks.machine import cores, machine
from benchmarks.quality.rows import read_rows
from benchmarks.race import Lap, Result, Role
from benchmarks.report import Report
from serin.metrics import auc

PEERS = ROOT / ".venv-bench" / "bin" / "python"
SPEC = ROOT / "examples" / "flights" / "spec.yaml"
CONTENDERS: dict[str, tuple[Role, str]] = {
    "ours": ("ours", "benchmarks.quality.ours"),
    "xgboost": ("peer", "benchmarks.quality.xgboost_peer"),
    "lightgbm": ("peer", "benchmarks.quality.lightgbm_peer"),
}


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    """Each contender once: what is compared is how good it is, and its seconds are shown beside."""
    if not PEERS.exists():
        raise ContenderFailed("the peers' environment is missing; run: make bench-setup")
    results: dict[str, Result] = {}
    versions: dict[str, dict[str, str]] = {}
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        dataset, model, training = _prepare(Path(scratch), say)
        target = read_rows(dataset, "test")[1]
        request = {
            "dataset": dataset, "model": model, "training": training, "threads": cores(),
            "rounds": 1000 if full else 200,
        }  # fmt: skip
        for name, (role, module) in CONTENDERS.items():
            python = sys.executable if role == "ours" else str(PEERS)
            with Child(module, python=python, threads=cores()) as child:
                versions[name] = child.versions
                lap = child.run(request)
            scores = np.asarray(lap.answer.pop("scores"), np.float32)
            found[name] = auc(target, scores)
            answer = {**lap.answer, "auc": found[name]}
            results[name] = Result(
                role=role, laps=(Lap(seconds=lap.seconds, peak_bytes=lap.peak_bytes, answer=answer),)
            )
            say(f"{name}: AUC {found[name]:.4f}")
    return Report(
        benchmark="quality",
        mode="full" if full else "quick",
        environment={"machine": machine(), "threads": cores(), "versions": versions},
        cases={"flights": results},
        line={"auc_gap": max(found[name] for name in found if name != "ours") - found["ours"]},
        notes=[f"{name}: AUC {value:.4f} on the test rows" for name, value in found.items()],
    )


def _prepare(folder: Path, say: Callable[[str], None]) -> tuple[str, dict[str, object], dict[str, object]]:
    from serin.etl.build import build_dataset
    from serin.spec.load import load_spec
    from serin.store import Store

    if not (SPEC.parent / "data" / "flights.parquet").exists():
        raise ContenderFailed(
            f"the flights are missing; run: python {SPEC.parent.relative_to(ROOT)}/fetch.py"
        )
    spec = load_spec(SPEC)
    dataset = build_dataset(spec.data, spec.features, spec.etl, store=Store(str(folder / "store")), say=say)
    return dataset.path, spec.model.model_dump(mode="json"), spec.training.model_dump(mode="json")
