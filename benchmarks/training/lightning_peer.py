"""Lightning with batches cut from tensors by a batch sampler, without logging, checkpoints and progress bar.

It is timed from its first epoch to its last, without set-up, like ours.
"""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.training.networks import Network, device, finish
from benchmarks.training.table import read_table

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Rows(Dataset[tuple[Tensor, ...]]):
    """A dataset that is indexed by a whole list of rows at a time."""

    def __init__(self, folder: str) -> None:
        self.arrays = tuple(torch.from_numpy(array) for array in read_table(folder))

    def __len__(self) -> int:
        return len(self.arrays[2])

    def __getitem__(self, rows: list[int]) -> tuple[Tensor, ...]:
        return tuple(array[rows] for array in self.arrays)


class Module(lightning.LightningModule):
    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__()
        self.network, self.rate = Network(request["kind"], request["hidden"]), request["rate"]
        self.losses: list[Tensor] = []
        self.began = self.ended = 0.0

    def on_train_start(self) -> None:
        finish(device())
        self.began = time.perf_counter()

    def on_train_end(self) -> None:
        finish(device())
        self.ended = time.perf_counter()

    def training_step(self, batch: tuple[Tensor, ...], _number: int) -> Tensor:
        num, cat, target = batch
        loss = functional.binary_cross_entropy_with_logits(self.network(num, cat.long()), target)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=1e-5, fused=True)


def run(request: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    rows, module = Rows(request["table"]), Module(request)
    sampler = BatchSampler(RandomSampler(rows), request["batch_rows"], drop_last=True)
    loader = DataLoader(rows, sampler=sampler, batch_size=None)
    trainer = lightning.Trainer(
        max_epochs=request["epochs"], accelerator="gpu" if device().type == "cuda" else "cpu", devices=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    steps = len(rows) // request["batch_rows"]
    return {"seconds": module.ended - module.began, "loss": float(torch.stack(module.losses[-steps:]).mean())}
