"""What is measured when a run begins, written down and kept; and fp16 with its scaled losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from serin.errors import Preempted, TrainingRefused
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.engine.optimizer import Optimizer
from serin.training.engine.tuning import autotune
from tests.fakes.datasets import make_dataset
from tests.unit.training.runs import ALONE, assert_same_bits, train_here

SMALL = ModelSpec(hidden=(32,), embedding=8)


def choices(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "choices.json").read_text())
    return found


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
    with pytest.raises(ValidationError, match="'ddp', 'fsdp', 'tensor' or 'pipeline'"):
        TrainingSpec(strategy="zero")  # type: ignore[arg-type]
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 300, "valid": 100, "test": 0})
    train_here(SMALL, TrainingSpec(epochs=1, strategy="pipeline"), dataset, tmp_path / "alone")
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
