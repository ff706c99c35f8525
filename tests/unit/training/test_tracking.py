"""Metrics to a real MLflow store, and a training that does not care when there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.launch.job import TrainingJob
from serin.training.launch.launcher import train
from serin.training.launch.tracking import tracked
from tests.fakes.datasets import make_dataset
from tests.logs import heard

MODEL = ModelSpec(hidden=(8,))
TRAINING = TrainingSpec(epochs=2, batch_rows=500)
SMALL = {"train": 2000, "valid": 500, "test": 500}


def test_epochs_settings_and_the_receipt_reach_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "parcels")
    dataset = make_dataset(tmp_path / "data", rows=SMALL)
    checkpoint = train(MODEL, TRAINING, dataset, folder=tmp_path / "run")

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("parcels")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == json.loads((tmp_path / "run" / "mlflow.json").read_text())["run"]
    assert run.info.status == "FINISHED"
    assert run.data.params["model.hidden"] == "[8]"
    assert run.data.metrics["best.test_auc"] == pytest.approx(checkpoint.metrics["test_auc"])
    assert run.data.metrics["best.receipt.seconds"] > 0
    curve = client.get_metric_history(run.info.run_id, "valid_auc")
    assert [point.step for point in curve] == [4, 8]


def test_an_mlflow_that_accepts_nothing_is_reported_once_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    job = TrainingJob(model=MODEL, training=TRAINING, dataset="", dataset_digest="", processes=1, gpu=False)
    said: list[str] = []
    with heard(said.append), tracked(job, tmp_path) as tracker:
        for step in range(3):
            tracker.hear({"event": "epoch", "t": 0.0, "step": step, "metrics": {"loss": 1.0}})
    (line,) = said
    assert line.startswith("MLflow did not accept the metrics: ")
    assert line.endswith("/progress.jsonl")
