"""The steps of a training: the order of rows, the update, and several steps at a time."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from serin.errors import BundleBroken, Preempted
from serin.formats.shards import SplitArrays
from serin.spec.training import TrainingSpec
from serin.training.data.loader import BLOCK_ROWS, Loader, StreamLoader, one_core_thread
from serin.training.data.tables import MappedTable, ResidentTable, open_table
from serin.training.engine import loop
from serin.training.engine.learner import Learner
from serin.training.engine.optimizer import Optimizer
from serin.training.engine.step import GraphedSteps
from serin.training.engine.tuning.step_autotune import TunedStep, ready_step
from tests.fakes.datasets import make_dataset
from tests.unit.training.runs import ALONE, MODEL, records, train_here

CPU = torch.device("cpu")
ROWS = 1003


def split(parts: tuple[int, ...] = (500, 500, 3)) -> SplitArrays:
    ids = [np.arange(sum(parts[:number]), sum(parts[: number + 1])) for number in range(len(parts))]
    return SplitArrays(
        num=tuple(np.stack([part, -part], axis=1).astype(np.float32) for part in ids),
        cat=tuple((part % 5).astype(np.int32)[:, None] for part in ids),
        target=tuple((part % 2).astype(np.float32) for part in ids),
        rows=tuple(ids),
    )


def loader(*, rank: int = 0, ranks: int = 1, seed: int = 7) -> Loader:
    return Loader(ResidentTable(split(), CPU), batch_rows=100, seed=seed, rank=rank, ranks=ranks)


def stream(parts: tuple[int, ...] = (9000, 9000, 2500), *, rank: int = 0, ranks: int = 1) -> StreamLoader:
    """Chunks of some 5,000 rows: several to an epoch, and blocks that lie in two of them, and in two parts."""
    table = MappedTable(split(parts), CPU)
    return StreamLoader(
        table, batch_rows=100, seed=7, rank=rank, ranks=ranks, chunk_bytes=5000 * table.row_bytes // ranks
    )


def ids(source: StreamLoader, start: int, stop: int) -> list[int]:
    return [int(row) for batch in source.batches(start, stop) for row in batch.num[:, 0].tolist()]


def rows_of_epoch(source: Loader, epoch: int) -> list[int]:
    steps = range(epoch * source.steps_per_epoch, (epoch + 1) * source.steps_per_epoch)
    return [row for step in steps for row in source.rows_of(step).tolist()]


def test_an_epoch_takes_each_row_at_most_once_and_leaves_out_less_than_a_batch() -> None:
    rows = rows_of_epoch(loader(), 0)
    assert len(rows) == len(set(rows)) == 1000


def test_ranks_share_each_batch_without_overlap() -> None:
    whole = rows_of_epoch(loader(), 1)
    pieces = [loader(rank=rank, ranks=4) for rank in range(4)]
    for step in range(10, 20):
        together = [row for piece in pieces for row in piece.rows_of(step).tolist()]
        assert together == whole[(step - 10) * 100 : (step - 9) * 100]


def test_every_epoch_has_its_own_order_and_the_seed_decides_it() -> None:
    assert rows_of_epoch(loader(), 0) != rows_of_epoch(loader(), 1)
    assert rows_of_epoch(loader(), 1) == rows_of_epoch(loader(), 1)
    assert rows_of_epoch(loader(), 1) != rows_of_epoch(loader(seed=8), 1)


def test_a_run_resumed_at_any_step_gets_the_batches_it_would_have_got() -> None:
    through = [batch.num for batch in loader().batches(0, 25)]
    resumed = [batch.num for batch in loader().batches(13, 25)]
    assert all(torch.equal(a, b) for a, b in zip(through[13:], resumed, strict=True))


def test_row_numbers_are_those_of_the_batches() -> None:
    source = loader()
    for rows, batch in zip(source.row_numbers(5, 15), source.batches(5, 15), strict=True):
        assert torch.equal(source.take(rows).num, batch.num)


def test_a_streamed_epoch_takes_each_row_at_most_once_and_leaves_out_less_than_a_batch() -> None:
    for epoch in (0, 1):
        rows = ids(stream(), epoch * 205, (epoch + 1) * 205)
        assert len(rows) == len(set(rows)) == 20_500


def test_a_stream_shuffles_blocks_and_rows_differently_each_epoch() -> None:
    first, second = ids(stream(), 0, 205), ids(stream(), 205, 410)
    assert first != second
    assert sorted(first) == sorted(second)
    in_first_batch = {row // BLOCK_ROWS for row in first[:100]}
    assert len(in_first_batch) >= 2  # a batch of neighbours would hold one block
    assert first[:100] != sorted(first[:100])


def test_a_stream_resumed_at_any_step_gives_the_batches_it_would_have_given() -> None:
    assert ids(stream(), 0, 410)[277 * 100 :] == ids(stream(), 277, 410)
    assert ids(stream(), 5, 5) == []


def test_ranks_stream_their_own_rows_without_overlap() -> None:
    pieces = [ids(stream(rank=rank, ranks=2), 0, 205) for rank in range(2)]
    assert len(pieces[0]) == len(pieces[1]) == 10_250
    assert not set(pieces[0]) & set(pieces[1])


def test_the_columns_of_a_streamed_batch_belong_to_the_same_rows() -> None:
    for batch in stream().batches(0, 60):
        assert batch.cat.dtype == torch.int64
        assert torch.equal(batch.cat[:, 0], batch.num[:, 0].long() % 5)
        assert torch.equal(batch.target, batch.num[:, 0] % 2)


def test_a_mapped_table_is_cut_as_a_resident_one_is() -> None:
    mapped, resident = MappedTable(split(), CPU), ResidentTable(split(), CPU)
    for start, stop in ((0, 10), (495, 1003), (500, 501)):
        assert torch.equal(mapped.slice(start, stop).num, resident.slice(start, stop).num)
        assert torch.equal(mapped.slice(start, stop).cat, resident.slice(start, stop).cat)


def test_a_table_that_does_not_fit_the_budget_stays_in_its_files() -> None:
    assert isinstance(open_table(split(), CPU, sizes=(5,), budget=0), MappedTable)
    assert isinstance(open_table(split(), CPU, sizes=(5,), budget=1 << 20), ResidentTable)


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_a_code_beyond_its_vocabulary_is_refused_before_training(budget: int) -> None:
    with pytest.raises(BundleBroken, match="has codes 0 to 4"):
        open_table(split(), CPU, sizes=(4,), budget=budget)


def test_a_thread_beside_the_training_uses_one_core_and_leaves_the_others_to_it() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_core_thread("beside") as thread:
            thread.submit(torch.randperm, 100_000).result()
            assert thread.submit(torch.get_num_threads).result() == 1
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


STEPS = 6
DECAY = 0.1


def steps_of(unused_at: int | None) -> Iterator[tuple[nn.Module, float]]:
    """Yields a network and the rate of each step, with its gradients; one step may leave a layer out."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5))
    for step in range(STEPS):
        network.zero_grad(set_to_none=True)
        rows = torch.randn(64, 7)
        layers = network[:1] if step == unused_at else network
        layers(rows).square().mean().backward()
        yield network, 0.01 / (step + 1)


def trained_by_serin(name: str, unused_at: int | None) -> tuple[nn.Module, dict[str, Tensor]]:
    updates, training = None, TrainingSpec.model_validate({"optimizer": name, "weight_decay": DECAY})
    for network, rate in steps_of(unused_at):
        if updates is None:
            updates = Optimizer(network, training, ALONE, by_row=False)
            updates.begin(network)
        updates.set_rate(rate)
        updates.apply()
    assert updates is not None
    return network, updates.state()


def trained_by_torch(name: str, unused_at: int | None) -> tuple[nn.Module, dict[str, Tensor]]:
    optimizer: torch.optim.Optimizer | None = None
    for network, rate in steps_of(unused_at):
        if optimizer is None:
            weights = list(network.parameters())
            groups = [
                {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": DECAY},
                {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
            ]
            optimizer = (
                torch.optim.AdamW(groups, fused=True)
                if name == "adamw"
                else torch.optim.SGD(groups, momentum=0.9, fused=True)
            )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    assert optimizer is not None
    return network, {
        f"{name}.{what}": value
        for name, weight in network.named_parameters()
        for what, value in optimizer.state[weight].items()
    }


# torch's SGD fails where a weight gets its first gradient after the others.
@pytest.mark.parametrize(
    ("name", "unused_at"), [("adamw", None), ("adamw", 0), ("adamw", 3), ("sgd", None), ("sgd", 3)]
)
def test_weights_and_state_are_those_of_torch_also_without_a_gradient(
    name: str, unused_at: int | None
) -> None:
    (ours, ours_state), (theirs, their_state) = (
        trained_by_serin(name, unused_at),
        trained_by_torch(name, unused_at),
    )
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert ours_state.keys() == their_state.keys()
    for what, value in their_state.items():
        assert torch.equal(ours_state[what], value), what


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad"])
def test_a_step_whose_gradients_overflow_changes_nothing(name: str) -> None:
    steps = steps_of(None)
    network, rate = next(steps)
    training = TrainingSpec.model_validate({"optimizer": name, "weight_decay": 0.0})
    updates = Optimizer(network, training, ALONE, by_row=False)
    updates.begin(network)
    updates.scale_losses(True)
    updates.set_rate(rate)
    updates.apply()
    next(steps)
    weights = [weight.clone() for weight in network.parameters()]
    state = {what: value.clone() for what, value in updates.state().items() if not what.startswith("scale.")}
    first = next(network.parameters())
    assert first.grad is not None
    first.grad[0, 0] = torch.inf
    updates.apply()
    assert all(torch.equal(*pair) for pair in zip(network.parameters(), weights, strict=True))
    assert all(torch.equal(updates.state()[what], value) for what, value in state.items())


def test_an_update_imports_no_compiler() -> None:
    """torch.optim does, at its first use: for longer than many trainings take."""
    program = """
import sys
import torch
from torch import nn
from serin.spec.training import TrainingSpec
from serin.training.engine.optimizer import Optimizer
from serin.training.parallel.ranks import Ranks

network = nn.Linear(3, 2)
world = Ranks(rank=0, size=1, device=torch.device("cpu"))
updates = Optimizer(network, TrainingSpec(), world, by_row=False)
updates.begin(network)
updates.set_rate(0.1)
network(torch.ones(4, 3)).sum().backward()
updates.apply()
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class OneByOne:
    def __init__(self, learner: Learner, count: int) -> None:
        self._learner, self.count, self.calls = learner, count, 0

    def __call__(self, rows: Tensor, rates: Tensor) -> Tensor:
        self.calls += 1
        losses = []
        for row_numbers, rate in zip(rows, rates.tolist(), strict=True):
            self._learner.updates.set_rate(rate)
            losses.append(self._learner.step(row_numbers))
        return torch.stack(losses)


@pytest.fixture
def stretched(monkeypatch: pytest.MonkeyPatch) -> list[OneByOne]:
    made: list[OneByOne] = []

    def ready(learner: Learner, source: Any, *asked: Any) -> TunedStep:
        made.append(OneByOne(learner, 7))
        assert isinstance(source, Loader)
        return replace(ready_step(learner, source, *asked), stretch=GraphedSteps(made[-1], source, CPU))

    monkeypatch.setattr(loop, "ready_step", ready)
    return made


def test_rows_of_many_steps_are_those_of_each() -> None:
    for rank in range(2):
        source = loader(rank=rank, ranks=2)
        for row, step in zip(source.rows_of_many(13, 5), range(13, 18), strict=True):
            assert torch.equal(row, source.rows_of(step))


def test_stretches_end_where_one_by_one_does_and_save_where_it_does(
    tmp_path: Path, stretched: list[OneByOne], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 1000, "valid": 200, "test": 200})
    training = TrainingSpec(
        epochs=4, batch_rows=20, learning_rate=3e-3, precision="fp32", checkpoint_every_steps=30
    )
    monkeypatch.setattr(loop, "_TALK_EVERY_S", 60.0)
    looks = iter(range(12))
    with pytest.raises(Preempted):
        train_here(MODEL, training, dataset, tmp_path / "run", lambda: next(looks, None) is None)
    train_here(MODEL, training, dataset, tmp_path / "run")
    assert sum(made.calls for made in stretched) > 10
    saved = [record["step"] for record in records(tmp_path / "run", "checkpoint")]
    assert {30, 50, 60, 90, 100, 120, 150, 180, 200} <= set(saved)
    monkeypatch.undo()
    train_here(MODEL, training, dataset, tmp_path / "reference")
    losses = [
        [record["metrics"]["loss"] for record in records(tmp_path / name, "epoch")]
        for name in ("run", "reference")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)  # rates went through float32
