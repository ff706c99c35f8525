"""What a GPU costs and could do, by the real driver; and how it hangs in its machine."""

import json
from pathlib import Path

import pytest

from serin.machine.hardware import inventory
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.stack.doctor import examine_gpus
from serin.training.launch.launcher import train
from tests.fakes.datasets import make_dataset

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not inventory(), reason="no GPU on this machine"
)


def test_a_training_s_receipt_holds_what_the_driver_and_the_roofline_say(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", rows={"train": 1_000_000, "valid": 10_000})
    gpu = inventory()[0]
    training = TrainingSpec(epochs=40, batch_rows=8192)
    train(ModelSpec(hidden=(512, 256)), training, dataset, folder=tmp_path / "run", devices=(gpu.id,))
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text())
    print(json.dumps(receipt))
    (cost,) = receipt["device"]
    assert cost["id"] == gpu.id
    assert 0 < cost["busy_share"] <= 1
    assert cost["joules"] > 0
    assert cost["peak_bytes"] > 0
    assert receipt["bound"] in ("start", "data", "launch", "memory", "compute")
    if receipt["mfu"] is not None:  # a run of a second and more
        assert 0 < receipt["mfu"] <= 1


def test_the_doctor_sees_the_card() -> None:
    found = {finding.what: finding for finding in examine_gpus()}
    print("\n".join(f"{finding.what}: {finding.found} {finding.advice}" for finding in found.values()))
    assert "GPU 0" in found
    assert "torch on the GPU" not in found
