"""Training on a real GPU under a real lease, and buffers that change in a step. Skipped, with the reason, elsewhere."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from serin.errors import WorkerFailed
from serin.formats.shards import read_split
from serin.formats.weights import read_weights
from serin.machine.hardware import inventory
from serin.machine.leases import Lease, lease
from serin.models.build import build_model, load_model
from serin.models.shape import TableShape
from serin.pipeline.train import train_model
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.data.loader import StreamLoader
from serin.training.data.tables import Batch, MappedTable, ResidentTable, open_table
from serin.training.engine.evaluate import evaluate
from serin.training.engine.learner import Learner
from serin.training.launch.job import ResolvedSettings, TrainingJob
from serin.training.launch.launcher import train
from serin.training.launch.run_dir import training_folder
from serin.training.parallel.gradients import loss_of
from serin.training.parallel.ranks import Ranks, open_world
from serin.training.programs import worker
from tests.fakes.datasets import SIZES, make_dataset
from tests.logs import heard
from tests.signals import hit
from tests.unit.training.runs import MODEL, at_the_next_checkpoint, choices, job_of, result

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")

GPU = torch.device("cuda", 0)
ALONE = Ranks(rank=0, size=1, device=GPU)


@pytest.fixture
def one_gpu(tmp_path: Path) -> Iterator[Lease]:
    with lease(1, home=tmp_path / "home", purpose="tests") as held:
        yield held


def test_the_driver_tells_which_gpus_are_here() -> None:
    devices = inventory()
    assert devices
    assert all(device.id.startswith(("GPU-", "MIG-")) and device.memory_bytes > 0 for device in devices)


@pytest.mark.timeout(400)
def test_a_run_on_the_gpu_survives_kill_9_and_ends_near_the_uninterrupted_one(
    one_gpu: Lease, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 200_000, "valid": 20_000, "test": 20_000})
    # A measured precision may differ between two runs beside other work, and with it every weight.
    training = TrainingSpec(epochs=2, batch_rows=512, checkpoint_every_steps=50, precision="fp32")
    with pytest.raises(WorkerFailed), at_the_next_checkpoint(tmp_path / "run", hit):
        train(MODEL, training, dataset, folder=tmp_path / "run", devices=one_gpu.ids)
    interrupted = train(MODEL, training, dataset, folder=tmp_path / "run", devices=one_gpu.ids)
    whole = train(MODEL, training, dataset, folder=tmp_path / "whole", devices=one_gpu.ids)

    ours, theirs = (read_weights(checkpoint.path).state for checkpoint in (interrupted, whole))
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    print("largest difference of a weight", difference)
    assert difference < 1e-3  # sums on a GPU may come in another order; equal bits were seen on an H200
    assert interrupted.metrics["test_auc"] == pytest.approx(whole.metrics["test_auc"], abs=1e-3)
    chosen = choices(tmp_path / "whole")
    print("chosen", chosen["execution"], chosen["execution_reason"])
    assert chosen["execution"] == "cuda_graph"
    (cost,) = json.loads((tmp_path / "whole" / "receipt.json").read_text())["device"]
    print("receipt", cost)
    assert cost["peak_bytes"] > 0
    assert cost["joules"] is None or cost["joules"] > 0


@pytest.mark.timeout(400)
def test_an_idle_training_gives_the_gpu_to_an_urgent_one_and_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 200_000, "valid": 2000, "test": 2000})
    training = TrainingSpec(
        epochs=8, batch_rows=512, checkpoint_every_steps=100, precision="fp32", processes=1
    )
    short = training.model_copy(update={"epochs": 1})
    lines: list[str] = []
    weights = {}

    def train_urgently(_pid: int) -> None:
        train_model(MODEL, short, dataset, name="refunds", priority="urgent")
        lines.append("the urgent training has ended")

    for name in ("alone", "disturbed"):
        home = tmp_path / name
        monkeypatch.setenv("SERIN_HOME", str(home))
        with heard(lines.append), ExitStack() as disturbance:
            if name == "disturbed":
                folder = training_folder(home, MODEL, training, dataset)
                disturbance.enter_context(at_the_next_checkpoint(folder, train_urgently))
            trained = train_model(MODEL, training, dataset, name="parcels", priority="idle")
        weights[name] = read_weights(trained.value.path).state
    (gave_way,) = (line for line in lines if "gives way" in line)
    print(gave_way)
    assert "training of refunds" in gave_way
    assert "the urgent training has ended" in lines
    assert any("resumed at step" in line for line in lines[lines.index(gave_way) :])
    difference = max(
        float((weights["alone"][name] - weights["disturbed"][name]).abs().max()) for name in weights["alone"]
    )
    print("largest difference of a weight", difference)
    assert difference < 1e-3  # sums on a GPU may come in another order


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
@pytest.mark.parametrize(("updates", "ensemble_size"), [("dense", 1), ("sparse", 1), ("sparse", 2)])
def test_a_captured_step_learns_what_an_eager_one_does(
    optimizer: str, updates: str, ensemble_size: int, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "dataset")
    found = {}
    for kind in ("cuda_graph", "eager"):
        training = TrainingSpec(
            epochs=3, batch_rows=100, learning_rate=0.003 if optimizer == "adamw" else 0.03, optimizer=optimizer,
            embedding_updates=updates, execution=kind, clip_norm=1.0, gradient_accumulation=2, precision="fp32",
        )  # fmt: skip
        model = ModelSpec(hidden=(64, 32), ensemble_size=ensemble_size)
        found[kind] = train_here(tmp_path / kind, job_of(model, training, dataset, gpu=True))
        assert choices(tmp_path / kind)["execution"] == kind
    losses = [[epoch["loss"] for epoch in found[kind]["epochs"]] for kind in found]
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    metrics = found["cuda_graph"]["metrics"]
    print(optimizer, updates, "largest difference of an epoch's loss", difference, metrics)
    assert difference < 1e-3
    assert metrics["test_auc"] > 0.75


def train_here(folder: Path, job: TrainingJob, world: Ranks = ALONE) -> dict[str, Any]:
    """metrics.json of a training in this process."""
    folder.mkdir(exist_ok=True)
    worker.train(job, folder, world, lambda: False)
    return result(folder)


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A world of one that goes through NCCL all the same."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
    ):
        monkeypatch.setenv(name, value)
    with open_world(gpu=True, group=True) as world:
        yield world


def test_precision_and_batch_are_measured_and_written_down(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 2_000_000, "valid": 20_000, "test": 20_000})
    train_here(
        tmp_path / "run", job_of(ModelSpec(hidden=(512, 256)), TrainingSpec(epochs=1), dataset, gpu=True)
    )
    found = choices(tmp_path / "run")
    print(
        {
            name: found[name]
            for name in found
            if name.startswith(("batch", "precision", "execution", "learning"))
        }
    )
    measured = dict(re.findall(r"(\w+) ([\d.]+) ms", found["precision_reason"]))
    assert {"fp32", "tf32", "bf16"} <= measured.keys()
    assert float(measured[found["precision"]]) <= float(measured["fp32"])
    assert "rows/s by rows per step: 256:" in found["batch_reason"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_precision_learns_in_a_captured_step(precision: str, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset")
    training = TrainingSpec(
        epochs=3, batch_rows=100, learning_rate=3e-3, clip_norm=1.0, execution="cuda_graph", precision=precision
    )  # fmt: skip
    job = job_of(ModelSpec(hidden=(64, 32)), training, dataset, gpu=True)
    found = train_here(tmp_path / "run", job)
    assert choices(tmp_path / "run")["execution"] == "cuda_graph"
    assert choices(tmp_path / "run")["precision"] == precision
    print(precision, [epoch["loss"] for epoch in found["epochs"]])
    assert found["metrics"]["test_auc"] > 0.75


def test_a_group_of_one_over_nccl_is_captured_and_learns_what_one_alone_does(
    tmp_path: Path, group_of_one: Ranks
) -> None:
    dataset = make_dataset(tmp_path / "dataset")
    training = TrainingSpec(
        epochs=3, batch_rows=100, learning_rate=3e-3, precision="fp32", execution="cuda_graph"
    )
    job = job_of(MODEL, training, dataset, gpu=True)
    found = [train_here(tmp_path / name, job, world) for name, world in (("a", ALONE), ("b", group_of_one))]
    print(choices(tmp_path / "b")["execution"], choices(tmp_path / "b")["execution_reason"])
    assert choices(tmp_path / "b")["execution"] == "cuda_graph"
    losses = [[epoch["loss"] for epoch in one["epochs"]] for one in found]
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print("largest difference of an epoch's loss", difference)
    assert difference < 1e-3


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
@pytest.mark.parametrize("kind", ["mlp", "dcn", "ft_transformer"])
def test_sharded_steps_over_nccl_are_those_of_one_alone(
    strategy: str, kind: str, group_of_one: Ranks
) -> None:
    spec = ModelSpec(
        kind=kind, hidden=(64, 32), embedding=16, **({"heads": 4} if kind == "ft_transformer" else {})
    )
    training = TrainingSpec(clip_norm=1.0)
    generator = torch.Generator(GPU).manual_seed(5)
    num = torch.randn(512, 3, device=GPU, generator=generator)
    cat = torch.stack(
        [torch.randint(0, size, (512,), device=GPU, generator=generator) for size in SIZES], dim=1
    )
    batch = Batch(num=num, cat=cat, target=(num[:, 0] > 0).float())
    losses = []
    for shared, world in (("ddp", ALONE), (strategy, group_of_one)):
        torch.manual_seed(1)
        network = build_model(spec, TableShape(numeric=3, sizes=SIZES, outputs=1))
        chosen = ResolvedSettings(
            batch_rows=512,
            steps_per_epoch=1,
            threads=1,
            precision="fp32",
            strategy=shared,
            device="cuda",
            torch="",
        )
        learner = Learner(network, training, chosen, loss_of("binary"), world)
        learner.updates.set_rate(0.01)
        losses.append([float(learner.step(batch)) for _ in range(10)])
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print("largest difference of a step's loss", difference)
    assert losses[0][-1] < losses[0][0]
    assert difference < 1e-3


def test_out_of_memory_continues_in_smaller_parts(tmp_path: Path) -> None:
    """The allocator is given so little that it really runs out."""
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 131_072, "valid": 1000, "test": 1000})
    model = ModelSpec(kind="ft_transformer", blocks=3, heads=8)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(GPU) + 800 * 2**20) / total, GPU)
    try:
        training = TrainingSpec(epochs=1, batch_rows=32_768, precision="fp32")
        job = job_of(model, training, dataset, gpu=True)
        found = train_here(tmp_path / "run", job)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    print("parts", choices(tmp_path / "run")["parts"], found["metrics"])
    assert choices(tmp_path / "run")["parts"] > 1
    assert choices(tmp_path / "run")["batch_rows"] == 32_768
    assert (
        "rows at a time from now on, still 32,768 per step"
        in (tmp_path / "run" / "progress.jsonl").read_text()
    )


def test_gradient_checkpointing_takes_less_memory_for_the_same_losses() -> None:
    spec = ModelSpec(kind="ft_transformer", blocks=4, heads=8)
    num = torch.randn(16_384, 3, device=GPU)
    cat = torch.zeros(16_384, 2, dtype=torch.int64, device=GPU)
    batch, losses, peaks = Batch(num=num, cat=cat, target=(num[:, 0] > 0).float()), [], []
    for again in (False, True):
        torch.manual_seed(1)
        network = build_model(spec, TableShape(numeric=3, sizes=SIZES, outputs=1))
        chosen = ResolvedSettings(
            batch_rows=1, steps_per_epoch=1, threads=1, precision="fp32", device="cuda", torch=""
        )
        learner = Learner(
            network, TrainingSpec(gradient_checkpointing=again), chosen, loss_of("binary"), ALONE
        )
        learner.updates.set_rate(0.001)
        torch.cuda.reset_peak_memory_stats(GPU)
        before = torch.cuda.memory_allocated(GPU)
        losses.append([float(learner.step(batch)) for _ in range(3)])
        peaks.append(torch.cuda.max_memory_allocated(GPU) - before)
    print("peak bytes without and with", peaks)
    assert peaks[1] < 0.8 * peaks[0]  # what attention needs on the way back stays; 0.74 on an H200
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


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


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, numeric, sizes, outputs, replaced):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(numeric, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))
        self.register_buffer("center", torch.zeros(numeric), persistent=False)
        self.replaced = replaced

    def forward(self, num, cat):
        if self.training:
            moved = 0.8 * self.center + 0.2 * num.detach().mean(0)
            if self.replaced:
                self.center = moved
            else:
                self.center.copy_(moved)
        return self.layers(num - self.center)
"""


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("batch_rows", [100, "auto"])
def test_the_metrics_on_a_gpu_are_those_of_the_saved_weights(
    replaced: bool, batch_rows: int | str, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 60_000, "valid": 800, "test": 800})
    (tmp_path / "net.py").write_text(NET)
    model = ModelSpec(module=f"{tmp_path / 'net.py'}:Net", options={"replaced": replaced})
    training = TrainingSpec(epochs=2, batch_rows=batch_rows, precision="fp32", execution="cuda_graph")
    reported = train_here(tmp_path / "run", job_of(model, training, dataset, gpu=True))["metrics"]
    chosen = choices(tmp_path / "run")
    assert chosen["execution"] == ("eager" if replaced else "cuda_graph")
    assert ("network.center is replaced" in chosen["execution_reason"]) is replaced
    network = load_model(tmp_path / "run" / "result")
    steps = json.loads((tmp_path / "run" / "result" / "state.json").read_text())["step"]
    assert int(network.get_buffer("network.layers.1.num_batches_tracked")) == steps
    cpu = torch.device("cpu")
    table = open_table(read_split(dataset.path, "test"), cpu, sizes=SIZES)
    found = evaluate(network, table, "binary", Ranks(rank=0, size=1, device=cpu))
    print({name: value - reported[f"test_{name}"] for name, value in found.items()})
    assert found == pytest.approx({name: reported[f"test_{name}"] for name in found}, abs=1e-4)
