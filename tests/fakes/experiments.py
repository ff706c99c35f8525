"""Folders of trainings and searches as they are left, without any training."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from pathlib import Path
from typing import Any

from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.launch.job import Status, TrainingJob, write_status

DATASET = "d" * 64


def leave_training(
    home: Path,
    *,
    model: str = "flights",
    auc: float = 0.78,
    error: float | None = 0.004,
    epochs: int = 8,
    began: float = 1_790_000_000.0,
    seconds: float = 312.0,
    cost: float | None = 0.42,
    state: str = "done",
    kind: str = "mlp",
    dataset: str = DATASET,
    **settings: Any,
) -> str:
    """Leaves a training; returns its run's name, which follows from all that is given."""
    given = repr((model, auc, began, kind, sorted(settings.items())))
    run = f"train-{hashlib.sha256(given.encode()).hexdigest()[:32]}"
    folder = home / "runs" / run
    folder.mkdir(parents=True)
    (folder / "model").write_text(f"{model}\n")
    own = {key: value for key, value in settings.items() if key in ModelSpec.model_fields}
    rest = {key: value for key, value in settings.items() if key not in own}
    job = TrainingJob(
        model=ModelSpec(kind=kind, **own), training=TrainingSpec(epochs=epochs, **rest), dataset="/data",
        dataset_digest=dataset, processes=1, gpu=True,
    )  # fmt: skip
    (folder / "training.json").write_text(job.model_dump_json())
    records = _epochs(auc, epochs)
    lines = [{"t": began, "event": "started"}, *({"event": "epoch", **each} for each in records)]
    (folder / "progress.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "receipt.json").write_text(json.dumps(_receipt(began, seconds, cost)))
    if state == "done":
        valid = {f"valid_{name}": value for name, value in records[-1]["metrics"].items()}
        test = {"test_auc": auc, "test_logloss": 0.69 - auc / 3}
        document = {
            "format": "serin.metrics", "version": 1, "metrics": {**valid, **test},
            "errors": {} if error is None else {"test_auc": error, "test_logloss": error / 2}, "epochs": records,
        }  # fmt: skip
        (folder / "result").mkdir()
        (folder / "result" / "metrics.json").write_text(json.dumps(document))
    elif state != "unfinished":
        write_status(folder, Status(state=state, reason="the worker was killed"))  # type: ignore[arg-type]
    for path in folder.rglob("*"):
        os.utime(path, (began, began))
    return run


def _epochs(auc: float, epochs: int) -> list[dict[str, Any]]:
    chance = random.Random(auc)
    return [
        {
            "epoch": at, "step": 100 * at, "loss": 0.68 - 0.2 * (1 - math.exp(-at / 3)) + chance.uniform(0, 0.01),
            "metrics": {"auc": auc - 0.2 * math.exp(-at / 2), "logloss": 0.7 - auc / 3 + 0.1 * math.exp(-at / 2)},
        }
        for at in range(1, epochs + 1)
    ]  # fmt: skip


def _receipt(began: float, seconds: float, cost: float | None) -> dict[str, Any]:
    device = {
        "id": "GPU-0", "name": "NVIDIA H200", "booked_s": seconds, "busy_share": 0.6, "peak_bytes": 9_000_000_000,
        "joules": 90.0 * seconds,
    }  # fmt: skip
    return {
        "format": "serin.store.receipt", "version": 1, "stage": "train", "started": began, "seconds": seconds,
        "device": [device], "rows": 40_000_000, "rows_per_s": 40_000_000 / seconds, "data_wait_share": 0.05,
        "mfu": 0.2, "joules": 90.0 * seconds, "cost": cost, "bound": "compute", "advice": "",
    }  # fmt: skip


def leave_search(home: Path, *, model: str = "flights", trials: int = 24, done: bool = True) -> str:
    """Leaves a search with trials that were complete, pruned and failed."""
    run = f"search-{hashlib.sha256(f'{model}{trials}'.encode()).hexdigest()[:32]}"
    folder = home / "runs" / run
    folder.mkdir(parents=True)
    (folder / "model").write_text(f"{model}\n")
    chance = random.Random(trials)
    rows: list[dict[str, Any]] = []
    for number in range(trials):
        state = "failed" if number % 11 == 10 else "pruned" if number % 4 == 3 else "complete"
        rate = float(f"{10 ** chance.uniform(-4, -1):.3g}")
        auc = 0.79 - 0.02 * (math.log10(rate) + 2.5) ** 2 + chance.uniform(-0.003, 0.003)
        metrics = {"valid_auc": auc, "valid_logloss": 0.7 - auc / 3} if state == "complete" else {}
        settings = {
            "training.learning_rate": rate,
            "model.hidden": chance.choice([[64], [256, 128], [512, 256, 64]]),
        }
        reason = "loss is not finite at step 31" if state == "failed" else ""
        rows.append(
            {"trial": number, "state": state, "settings": settings, "metrics": metrics, "seconds": 40.0 + number,
             "reason": reason}
        )  # fmt: skip
    complete = [row for row in rows if row["metrics"]]
    best = max(complete, key=lambda row: float(row["metrics"]["valid_auc"]))
    importance = {"training.learning_rate": 0.82, "model.hidden": 0.18}
    found = {"trials": rows, "trial": best["trial"], "importance": importance} if done else {"trials": rows}
    (folder / ("result.json" if done else "trials.json")).write_text(json.dumps(found))
    return run
