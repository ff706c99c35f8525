"""Training on a real GPU under a real lease. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serin.errors import WorkerFailed
from serin.formats.shards import read_split
from serin.formats.weights import read_weights
from serin.hardware import Lease, inventory, lease
from serin.spec.stages import ModelSpec, TrainingSpec
from serin.training import worker
from serin.training.job import TrainingJob
from serin.training.launch import train
from serin.training.progress import Follower
from serin.training.stream import StreamLoader
from serin.training.tables import MappedTable, ResidentTable
from serin.training.world import World
from tests.fakes.datasets import SIZES, make_dataset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")

MODEL = ModelSpec(hidden=(64, 32), dropout=0.1)
GPU = torch.device("cuda", 0)


@pytest.fixture
def one_gpu(tmp_path: Path) -> Iterator[Lease]:
    with lease(1, home=tmp_path / "home", purpose="tests") as held:
        yield held


def kill_9_at_the_first_checkpoint(folder: Path) -> None:
    folder.mkdir()
    follower = Follower(folder)

    def watch() -> None:
        pid, deadline = 0, time.monotonic() + 120
        while time.monotonic() < deadline:
            for record in follower.read():
                pid = record.get("pid", pid)
                if record["event"] == "checkpoint":
                    os.kill(pid, signal.SIGKILL)
                    return
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()


def test_the_driver_tells_which_gpus_are_here() -> None:
    devices = inventory()
    assert devices
    assert all(device.id.startswith(("GPU-", "MIG-")) and device.memory_bytes > 0 for device in devices)


@pytest.mark.timeout(400)
def test_a_run_on_the_gpu_survives_kill_9_and_ends_near_the_uninterrupted_one(
    one_gpu: Lease, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 200_000, "valid": 20_000, "test": 20_000})
    training = TrainingSpec(epochs=2, batch_rows=512, checkpoint_every_steps=50)
    kill_9_at_the_first_checkpoint(tmp_path / "run")
    with pytest.raises(WorkerFailed):
        train(MODEL, training, dataset, folder=tmp_path / "run", devices=one_gpu.ids)
    interrupted = train(MODEL, training, dataset, folder=tmp_path / "run", devices=one_gpu.ids)
    whole = train(MODEL, training, dataset, folder=tmp_path / "whole", devices=one_gpu.ids)

    ours, theirs = (read_weights(checkpoint.path).state for checkpoint in (interrupted, whole))
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    print("largest difference of a weight", difference)
    assert difference < 1e-3  # sums on a GPU may come in another order; equal bits were seen on an H200
    assert interrupted.metrics["test_auc"] == pytest.approx(whole.metrics["test_auc"], abs=1e-3)
    choices = json.loads((tmp_path / "whole" / "choices.json").read_text())
    print("chosen", choices["step"], choices["step_reason"])
    assert choices["step"] == "captured"
    (cost,) = json.loads((tmp_path / "whole" / "receipt.json").read_text())["device"]
    print("receipt", cost)
    assert cost["peak_bytes"] > 0
    assert cost["joules"] is None or cost["joules"] > 0


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
@pytest.mark.parametrize("updates", ["dense", "rows"])
def test_a_captured_step_learns_what_an_eager_one_does(optimizer: str, updates: str, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset")
    found = {}
    for kind in ("captured", "eager"):
        training = TrainingSpec(
            epochs=3, batch_rows=100, learning_rate=0.003 if optimizer == "adamw" else 0.03, optimizer=optimizer,
            embedding_updates=updates, step=kind, clip_norm=1.0, accumulate=2, precision="fp32",
        )  # fmt: skip
        job = TrainingJob(
            model=ModelSpec(hidden=(64, 32)), training=training, dataset=dataset.path, dataset_digest="",
            processes=1, gpu=True,
        )  # fmt: skip
        (tmp_path / kind).mkdir()
        worker.train(job, tmp_path / kind, World(rank=0, size=1, device=GPU), lambda: False)
        assert json.loads((tmp_path / kind / "choices.json").read_text())["step"] == kind
        found[kind] = json.loads((tmp_path / kind / "result" / "metrics.json").read_text())
    losses = [[epoch["loss"] for epoch in found[kind]["epochs"]] for kind in found]
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(
        optimizer, updates, "largest difference of an epoch's loss", difference, found["captured"]["metrics"]
    )
    assert difference < 1e-3
    assert found["captured"]["metrics"]["test_auc"] > 0.75


def test_streamed_rows_reach_the_gpu_as_they_reach_the_host(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 50_000})
    split, gpu = read_split(dataset.path, "train"), torch.device("cuda", 0)
    loaders = [
        StreamLoader(MappedTable(split, device), batch_rows=1000, seed=5, chunk_bytes=200_000)
        for device in (gpu, torch.device("cpu"))
    ]
    for table in (ResidentTable(split, gpu), MappedTable(split, gpu)):
        table.check_codes(SIZES)
    for sent, here in zip(*(loader.batches(40, 160) for loader in loaders), strict=True):
        assert sent.num.device == gpu
        assert torch.equal(sent.num.cpu(), here.num)
        assert torch.equal(sent.cat.cpu(), here.cat)
        assert torch.equal(sent.target.cpu(), here.target)
