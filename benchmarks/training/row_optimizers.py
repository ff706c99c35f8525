"""python -m benchmarks.training.row_optimizers: row-wise Adagrad beside torch's SparseAdam on a table of 50 M weights.

Both update only the rows that a batch uses; the rest of the network has AdamW. Each contender has several learning
rates, of which the best counts, and the same rows in the same order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from serin.models.build import Dcn
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.engine.optimizer import Optimizer
from serin.training.parallel.ranks import Ranks

WIDTH = 16
SIZES = (2_000_000, 1_200_000)
SHAPE = TableShape(numeric=1, sizes=SIZES, outputs=1)
Step = Callable[[Tensor], None]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.row_optimizers", description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--batch-rows", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=(1e-3, 3e-3, 1e-2, 3e-2, 1e-1))
    asked = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    rows = make_rows(asked.rows)
    print("optimizer          rate   CPU s/epoch   state MB   valid log loss after each epoch")
    for name, begin in (("row-wise Adagrad", row_adagrad), ("SparseAdam", sparse_adam)):
        for rate in asked.rates:
            torch.manual_seed(1)
            network = Dcn(ModelSpec(kind="dcn", embedding=WIDTH, hidden=(64,)), SHAPE)
            step, state_bytes = begin(network, rate)
            losses, seconds = train(network, step, rows, asked.batch_rows, asked.epochs)
            told = "  ".join(f"{loss:.4f}" for loss in losses)
            print(f"{name:<18}{rate:>6g}{seconds:>13.1f}{state_bytes() / 1e6:>11.1f}   {told}", flush=True)


def make_rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Few ids are frequent and most are rare; each has its own effect."""
    chance = torch.Generator().manual_seed(3)
    cat = torch.stack([(size * torch.rand(count, generator=chance) ** 6).long() for size in SIZES], dim=1)
    num = torch.randn(count, 1, generator=chance)
    effect = 2 * torch.sin(cat.double()).sum(dim=1) + num[:, 0] + torch.randn(count, generator=chance)
    return num, cat, (effect > 0).float()


def row_adagrad(network: Dcn, rate: float) -> tuple[Step, Callable[[], int]]:
    optimizer = Optimizer(
        network, TrainingSpec(clip_norm=None), Ranks(rank=0, size=1, device=torch.device("cpu")), by_row=True
    )
    optimizer.begin(network)
    optimizer.set_rate(rate)

    def step(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.apply()
        optimizer.clear()

    return step, lambda: sum(one.nbytes for name, one in optimizer.state().items() if name.startswith("rows"))


def sparse_adam(network: Dcn, rate: float) -> tuple[Step, Callable[[], int]]:
    assert network.categories is not None
    network.categories.sparse = True
    table = network.categories.weight
    dense = torch.optim.AdamW([weight for weight in network.parameters() if weight is not table], lr=rate)
    sparse = torch.optim.SparseAdam([table], lr=rate)

    def step(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        dense.step()
        sparse.step()
        dense.zero_grad()
        sparse.zero_grad()

    return step, lambda: sum(one.nbytes for one in sparse.state[table].values() if isinstance(one, Tensor))


def train(
    network: nn.Module, step: Step, rows: tuple[Tensor, Tensor, Tensor], batch_rows: int, epochs: int
) -> tuple[list[float], float]:
    """Returns the loss on the last tenth of the rows after each epoch, and the CPU seconds of one epoch's steps."""
    last, losses, seconds = int(0.9 * len(rows[0])), [], 0.0
    for _ in range(epochs):
        begin = time.process_time()
        for at in range(0, last - batch_rows, batch_rows):
            num, cat, target = (each[at : at + batch_rows] for each in rows)
            step(binary_cross_entropy_with_logits(network(num, cat)[:, 0], target))
        seconds += time.process_time() - begin
        network.eval()
        with torch.no_grad():
            num, cat, target = (each[last:] for each in rows)
            losses.append(binary_cross_entropy_with_logits(network(num, cat)[:, 0], target).item())
        network.train()
    return losses, seconds / epochs


if __name__ == "__main__":
    main()
