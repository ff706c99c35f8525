"""Curves of model size: CPU time to train on, export and score with networks of so many weights."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.child import Child
from benchmarks.clock import Watch
from benchmarks.scale.curves import Curve

QUICK = (64, 256, 1024)  # units of each of two layers
FULL = (64, 256, 1024, 2048, 4096)
ROWS, BATCH_ROWS, SCORED = 4096, 1024, 1000
WHAT = {
    "model_train": ("training by weights, one thread, 1,024 rows in a step", "CPU ms per 1,000 rows", 1.0),
    "model_export": ("export by weights, with all its checks", "CPU seconds", 1.0),
    "model_score": ("scoring by weights, 1,000 rows at a time", "CPU us per row", 1.0),
}


def measure_model(*, full: bool, say: Callable[[str], None]) -> list[Curve]:
    found: dict[str, dict[int, float]] = {name: {} for name in WHAT}
    with (
        tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch,
        Child("benchmarks.scale.model_curve", python=sys.executable, threads=1) as child,
    ):
        for units in FULL if full else QUICK:
            answer = child.run({"units": units, "folder": f"{scratch}/{units}"}).answer
            for name in WHAT:
                found[name][answer["trained" if name == "model_train" else "exported"]] = answer[name]
            say(f"model with {answer['exported']:,} weights")
    return [
        Curve(name=name, what=what, unit=unit, expected=expected, points=found[name])
        for name, (what, unit, expected) in WHAT.items()
    ]


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """A contender: one size of model."""
    from benchmarks.training.ours import run as train
    from benchmarks.training.table import make_table
    from serin.export.build import export_model
    from serin.formats.weights import read_weights
    from serin.scoring.predict import Scorer
    from serin.store.store import Store
    from tests.unit.export.small_dataset import flights, make_trained

    folder, hidden = Path(request["folder"]), [request["units"]] * 2
    make_table(folder / "table", ROWS)
    asked = {
        "table": str(folder / "table"), "kind": "mlp", "batch_rows": BATCH_ROWS, "threads": 1, "hidden": hidden,
        "rate": 0.003, "epochs": 1, "precision": "fp32",
    }  # fmt: skip
    laps = [train(asked) for _ in range(3)]
    trained = make_trained(folder / "trained", "binary", model={"kind": "mlp", "hidden": hidden})
    watch = Watch()
    bundle = export_model(
        trained.spec, trained.checkpoint, trained.dataset, store=Store(str(folder / "store")), lineage={}
    )
    export_s = watch.read()["cpu_s"]
    scorer, rows = Scorer(bundle.path, threads=1), flights(SCORED)
    return {
        "trained": laps[0]["weights"],
        "exported": sum(each.numel() for each in read_weights(trained.checkpoint.path).state.values()),
        "model_train": min(lap["cpu_s"] for lap in laps) / ROWS * 1e6,
        "model_export": export_s,
        "model_score": _cheapest(lambda: scorer.answers(rows)) / SCORED * 1e6,
    }


def _cheapest(work: Callable[[], object], times: int = 5) -> float:
    found = []
    for _ in range(times):
        watch = Watch()
        work()
        found.append(watch.read()["cpu_s"])
    return min(found)
