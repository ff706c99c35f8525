"""What is measured of a training: choices at its start, a trace, a roofline, and metrics to MLflow."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from serin.errors import Preempted, TrainingRefused
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import NO_DATASET
from serin.training.engine.optimizer import Optimizer
from serin.training.engine.tuning import autotune
from serin.training.engine.tuning.roofline import measure_peaks, weigh
from serin.training.launch.launcher import train
from serin.training.launch.tracking import tracked
from tests.fakes.datasets import make_dataset
from tests.logs import heard
from tests.unit.training.runs import ALONE, assert_same_bits, choices, job_of, train_here

SMALL = ModelSpec(hidden=(32,), embedding=8)
MODEL = ModelSpec(hidden=(8,))
TRAINING = TrainingSpec(epochs=2, batch_rows=500, execution="eager")


def test_the_batch_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 105_000, "valid": 500, "test": 0})
    training = TrainingSpec(epochs=1)
    calls = iter(range(20))
    with pytest.raises(Preempted):
        train_here(SMALL, training, dataset, tmp_path / "run", lambda: next(calls, None) is None)
    chosen = choices(tmp_path / "run")
    print(chosen["batch_rows"], chosen["batch_reason"])
    assert chosen["batch_rows"] in (256, 512)
    assert chosen["batch_reason"].startswith("rows/s by rows per step: 256: ")
    assert chosen["learning_rate"] == training.learning_rate
    monkeypatch.setattr(autotune, "measure_batch_rows", lambda *_: pytest.fail("measured again"))
    train_here(SMALL, training, dataset, tmp_path / "run")
    assert choices(tmp_path / "run") == chosen
    monkeypatch.undo()
    asked = TrainingSpec(epochs=1, batch_rows=chosen["batch_rows"], precision=chosen["precision"])
    train_here(SMALL, asked, dataset, tmp_path / "asked")
    assert_same_bits(tmp_path / "run", tmp_path / "asked")  # measuring left nothing behind


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 says so
def test_a_precision_is_honoured_or_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 300, "valid": 100, "test": 0})
    with pytest.raises(TrainingRefused, match="TF32 needs a GPU and this run is on a CPU"):
        train_here(SMALL, TrainingSpec(precision="tf32"), dataset, tmp_path / "tf32")
    # Where oneDNN fails at bf16, torch turns it off for all that this process still computes: until this test ends.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    train_here(SMALL, TrainingSpec(epochs=1, precision="bf16"), dataset, tmp_path / "bf16")
    assert choices(tmp_path / "bf16")["precision"] == "bf16"
    with pytest.raises(ValidationError, match="'auto', 'fp32', 'tf32', 'bf16' or 'fp16'"):
        TrainingSpec(precision="fp8")  # type: ignore[arg-type]


def test_a_strategy_that_a_network_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="'auto', 'ddp', 'fsdp' or 'tensor'"):
        TrainingSpec(strategy="zero")  # type: ignore[arg-type]
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 300, "valid": 100, "test": 0})
    train_here(SMALL, TrainingSpec(epochs=1, strategy="tensor"), dataset, tmp_path / "alone")
    assert choices(tmp_path / "alone")["strategy_reason"] == "one process"  # nothing to share


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
def test_scaled_gradients_update_as_plain_ones_do_and_an_overflow_is_left_out(
    optimizer: str, by_row: bool
) -> None:
    weights = []
    for scaled in (False, True):
        torch.manual_seed(1)
        network = build_model(SMALL, TableShape(numeric=1, sizes=(5, 7), outputs=1))
        spec = TrainingSpec(optimizer=optimizer, weight_decay=0.0, clip_norm=1.0)  # type: ignore[arg-type]
        updates = Optimizer(network, spec, ALONE, by_row=by_row)
        updates.begin(network)
        updates.scale_losses(scaled)
        updates.set_rate(0.01)
        factors = [1.0, float("inf"), 1.0] if scaled else [1.0, 1.0]
        for factor in factors:
            updates.clear()
            loss = network(torch.ones(3, 1), torch.tensor([[4, 0], [4, 0], [1, 0]])).square().sum() * factor
            torch.autograd.backward(loss if updates.scale is None else loss * updates.scale.factor)
            updates.apply()
        if updates.scale is not None:
            assert float(updates.scale.factor) == 2.0**15  # halved once
        weights.append(network.state_dict())
    for name, plain in weights[0].items():
        assert torch.allclose(plain, weights[1][name], atol=1e-6), name


SHAPE = TableShape(numeric=3, sizes=(7, 40), outputs=1)


def test_products_of_a_row_are_those_of_its_layers_three_times() -> None:
    network = build_model(ModelSpec(hidden=(8, 4), embedding=2), SHAPE)
    found = weigh(network, SHAPE, optimizer="adamw")
    assert found.flops_per_row == 3 * 2 * (7 * 8 + 8 * 4 + 4 * 1)
    assert found.table_bytes_per_step == 4 * 10 * 47 * 2
    assert (
        found.of(100, 2, by_row=True)[1] == found.of(100, 2, by_row=False)[1] - 2 * found.table_bytes_per_step
    )
    assert network.training


def test_weighing_draws_no_random_number_and_leaves_the_network_as_it_was() -> None:
    network = build_model(ModelSpec(hidden=(8,), dropout=0.5), SHAPE)
    before = torch.get_rng_state()
    weigh(network, SHAPE, optimizer="sgd")
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_hooks for module in network.modules())


def test_a_network_that_refuses_is_not_weighed() -> None:
    class Refuses(torch.nn.Module):
        def forward(self, num: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("wants more than two rows")

    assert weigh(Refuses(), SHAPE, optimizer="adamw") is None


def test_the_machine_s_best_is_more_than_nothing() -> None:
    best = measure_peaks(torch.device("cpu"), "fp32")
    print(f"{best.flops_per_s / 1e9:.1f} GFLOP/s, {best.bytes_per_s / 1e9:.1f} GB/s")
    assert best.flops_per_s > 1e8
    assert best.bytes_per_s > 1e8


TRACKED = {"train": 2000, "valid": 500, "test": 500}


def test_epochs_settings_and_the_receipt_reach_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "parcels")
    dataset = make_dataset(tmp_path / "data", rows=TRACKED)
    checkpoint = train(MODEL, TRAINING, dataset, folder=tmp_path / "run")

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("parcels")
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
    job = job_of(MODEL, TRAINING, NO_DATASET)
    said: list[str] = []
    with heard(said.append), tracked(job, tmp_path) as tracker:
        for step in range(3):
            tracker.hear({"event": "epoch", "t": 0.0, "step": step, "metrics": {"loss": 1.0}})
    (line,) = said
    assert line.startswith("MLflow did not accept the metrics: ")
    assert line.endswith("/progress.jsonl")
