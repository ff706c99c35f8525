"""Trains candidates of several kinds one after the other and keeps the best, or a weighted blend of a few.

`python -m serin.training.programs.auto FOLDER PARENT_PID`, started by the launcher for `model.kind: auto`. Every
candidate is an ordinary training in `candidates/NAME`, so that an interrupted run finds those that are done. Only the
valid rows decide; the test rows are scored once, by what was chosen. How it ended is in status.json.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from serin.errors import LossNotFinite, NetworkUnfit, Preempted, TrainingRefused, WorkerFailed
from serin.formats.blend import write_blend
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.shards import Array, Rows, read_split
from serin.formats.trained import read_trained, write_trained
from serin.machine import environment
from serin.models.margins import Margins, open_margins
from serin.models.trees import scores
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.engine.evaluate import goodness
from serin.training.launch import launcher
from serin.training.launch.job import TrainingJob, result_folder
from serin.training.launch.machines import Machines
from serin.training.launch.progress import tell
from serin.training.launch.status import Status
from serin.training.programs.attempt import run_attempt
from serin.training.results.blend import choose_weights
from serin.training.results.judge import judge_scores
from serin.training.results.publish import publish_result

_FAULTS = (LossNotFinite, NetworkUnfit, TrainingRefused, WorkerFailed)
_ATTENTION_CELLS = 2_000_000  # of the train rows: above, a transformer takes longer than all others together
_EPOCHS_BELOW_ROWS = {10_000: 60, 50_000: 20}  # a network needs more passes over few rows
_WAVES = {"numeric_scaling": "robust", "numeric_embedding": "periodic"}
_PIECES = {"numeric_scaling": "robust", "numeric_embedding": "piecewise_linear"}


def main() -> None:
    run_attempt(train)


def candidates(job: TrainingJob, data: DatasetDescription) -> Iterator[tuple[str, ModelSpec, TrainingSpec]]:
    """Yields what is tried, in order: kinds that differ most come first, variations of them later."""
    given = job.training
    enough = [epochs for below, epochs in _EPOCHS_BELOW_ROWS.items() if data.rows["train"] < below]
    epochs = max([given.epochs, *enough])
    common = TrainingSpec(
        seed=given.seed, class_weights=given.class_weights, processes=job.processes, epochs=epochs
    )
    trees = common.model_copy(update={"epochs": TrainingSpec().epochs})
    slow: dict[str, JsonValue] = {
        "eta": 0.05,
        "max_depth": 8,
        "subsample": 0.8,
        "colsample_bytree": 0.6,
        "min_child_weight": 5,
    }
    shallow: dict[str, JsonValue] = {"eta": 0.05, "max_depth": 4, "subsample": 0.8, "colsample_bytree": 0.8}
    yield "trees", ModelSpec(kind="xgboost"), trees
    wide = common.model_copy(update={"learning_rate": 2e-3, "weight_decay": 0.02})
    yield "mlp", ModelSpec.model_validate({"kind": "mlp", "dropout": 0.2, **_WAVES}), wide
    yield "trees-slow", ModelSpec(kind="xgboost", rounds=1000, options=slow), trees
    yield "tabm", ModelSpec.model_validate({"kind": "tabm", "dropout": 0.1, **_PIECES}), wide
    yield "trees-shallow", ModelSpec(kind="xgboost", rounds=1500, options=shallow), trees
    yield "dcn", ModelSpec.model_validate({"kind": "dcn", "dropout": 0.2, **_WAVES}), wide
    if data.rows["train"] * (len(data.numeric) + len(data.categorical)) <= _ATTENTION_CELLS:
        model = ModelSpec(kind="ft_transformer", embedding=32, heads=4, numeric_scaling="robust")
        yield "ft_transformer", model, common


def train(job: TrainingJob, folder: Path, stop: threading.Event) -> Status:
    """Runs one attempt to the end. Raises Preempted."""
    data, began = read_dataset(job.dataset), time.monotonic()
    if not data.rows.get("valid"):
        reason = "model.kind: auto chooses by the valid rows, and there are none; set data.split.valid"
        raise TrainingRefused(folder=folder, reason=reason)
    trained = _train_candidates(job, data, folder, stop, began)
    valid = read_split(job.dataset, "valid").whole()
    ask = {name: open_margins(place) for name, place in trained.items()}
    margins = {name: _margins(each, valid) for name, each in ask.items()}

    def judge(margin: Array) -> float:
        return goodness(judge_scores(valid.target, scores(margin, data.task), data.task, data.targets))

    weights = choose_weights(margins, judge, blend=job.model.auto.ensemble)
    tell(folder, "note", text="chosen: " + ", ".join(f"{name} {each:.0%}" for name, each in weights.items()))
    metrics = _metrics(data, valid, "valid", {name: margins[name] for name in weights}, weights)
    if job.test and data.rows.get("test"):
        rows = read_split(job.dataset, "test").whole()
        metrics |= _metrics(
            data, rows, "test", {name: _margins(ask[name], rows) for name in weights}, weights
        )
    _publish(
        job, data, folder, trained, weights, metrics, {name: judge(each) for name, each in margins.items()}
    )
    return Status(
        state="done",
        step=len(trained),
        rows=len(trained) * data.rows["train"],
        work_s=time.monotonic() - began,
    )


def _train_candidates(
    job: TrainingJob, data: DatasetDescription, folder: Path, stop: threading.Event, began: float
) -> dict[str, Path]:
    """Returns the result folders of the candidates that could be trained, at least one."""
    found: dict[str, Path] = {}
    devices = tuple((environment.visible_devices() or "").split(",")) if job.gpu else ()
    dataset = Dataset(path=job.dataset, digest=job.dataset_digest, rows=dict(data.rows))
    reason = ""
    for number, (name, model, training) in enumerate(candidates(job, data)):
        late = time.monotonic() - began > job.model.auto.budget
        if number >= job.model.auto.trials or (late and found):
            break
        if stop.is_set():
            raise Preempted(step=number, folder=folder)
        place = folder / "candidates" / name
        try:
            checkpoint = launcher.train(
                model,
                training,
                dataset,
                folder=place,
                devices=devices,
                stop=stop,
                test=False,
                machines=Machines(),
            )
        except _FAULTS as error:
            reason = str(error)
            tell(folder, "note", text=f"candidate {name} failed: {reason.splitlines()[0]}")
            continue
        found[name] = result_folder(place)
        shown = ", ".join(f"{key} {value:.4f}" for key, value in checkpoint.metrics.items())
        tell(folder, "note", text=f"candidate {name}: {shown}")
    if not found:
        raise TrainingRefused(folder=folder, reason=f"every candidate failed, the last one with: {reason}")
    return found


def _margins(ask: Margins, rows: Rows) -> Array:
    return ask(np.asarray(rows.num), np.asarray(rows.cat))


def _metrics(
    data: DatasetDescription,
    rows: Rows,
    split: str,
    margins: Mapping[str, Array],
    weights: Mapping[str, float],
) -> dict[str, float]:
    blended = sum(weight * margins[name].astype(np.float64) for name, weight in weights.items())
    found = scores(np.asarray(blended, np.float32), data.task)
    judged = judge_scores(np.asarray(rows.target), found, data.task, data.targets)
    return {f"{split}_{name}": value for name, value in judged.items()}


def _publish(
    job: TrainingJob,
    data: DatasetDescription,
    folder: Path,
    trained: Mapping[str, Path],
    weights: Mapping[str, float],
    metrics: dict[str, float],
    judged: Mapping[str, float],
) -> None:
    """Publishes the one that was chosen as if it had been asked for, or the blend."""
    sizes = [column.size for column in data.categorical]
    shape = {"numeric": len(data.numeric), "sizes": sizes, "outputs": data.outputs}
    chosen = [(trained[name], weight) for name, weight in weights.items()]

    def fill(scratch: Path) -> None:
        if len(chosen) > 1:
            write_blend(scratch, chosen, {"model": job.model.model_dump(), "shape": shape, "task": data.task})
            return
        record, content = read_trained(chosen[0][0])
        write_trained(scratch, content, record.model_dump(exclude={"weights_sha256"}))

    publish_result(
        folder,
        fill=fill,
        job=job,
        step=len(trained),
        steps=len(trained),
        choices={"weights": dict(weights), "valid": dict(judged)},
        metrics=metrics,
    )


if __name__ == "__main__":
    main()
