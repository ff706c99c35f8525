"""Trains a small convolutional network on scikit-learn's digits. Started by `serin train examples/digits/spec.yaml`.

It saves after every epoch, resumes where it was interrupted, and exits with 75 when it is asked to stop.
"""

from __future__ import annotations

import signal
import sys

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from serin.training.foreign.own_script import ScriptRun, this_run

STOPPED = 75  # "saved; run it again"


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images float32[1, 8, 8] from 0 to 16 and their digits; every fifth image is a test."""

    def __init__(self, *, test: bool) -> None:
        digits = load_digits()
        chosen = (np.arange(len(digits.target)) % 5 == 0) == test
        self.images = torch.tensor(digits.images[chosen], dtype=torch.float32).unsqueeze(1)
        self.labels = torch.tensor(digits.target[chosen])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        return self.images[position], self.labels[position]


class Network(nn.Sequential):
    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(8 * channels, 10),
        )  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = super().forward(image / 8.0 - 1.0)  # so that clients send raw pixels
        return result


def main() -> None:
    run = this_run()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    torch.set_num_threads(1)  # more threads do not pay off for images this small
    torch.manual_seed(run.seed)
    network = Network(run.options["channels"])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)  # it has no state to save
    saved = run.checkpoints / "weights.safetensors"
    done = 0
    if run.resume:
        state = load_file(saved)
        done = int(state.pop("epochs_done"))
        network.load_state_dict(state)
    for epoch in range(done + 1, run.epochs + 1):
        train_epoch(network, optimizer, run, epoch)
        state = {**network.state_dict(), "epochs_done": torch.tensor(epoch)}
        save_file(state, saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)  # atomic
        run.report(epoch, {"accuracy": accuracy(network)})
        if asked:
            sys.exit(STOPPED)
    leave(network, run)


def train_epoch(network: Network, optimizer: torch.optim.Optimizer, run: ScriptRun, epoch: int) -> None:
    order = torch.Generator().manual_seed(run.seed * 1000 + epoch)  # the same when the epoch is repeated
    batches = DataLoader(Digits(test=False), run.options["batch_rows"], shuffle=True, generator=order)
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(network: Network) -> float:
    test = Digits(test=True)
    return float((network(test.images).argmax(dim=1) == test.labels).float().mean())


@torch.no_grad()
def leave(network: Network, run: ScriptRun) -> None:
    """Writes the graph, golden rows with their answers, and the metrics."""
    network.eval()
    rows = Digits(test=True).images[:64]
    batch = torch.export.Dim("batch", min=1, max=2**20)
    torch.onnx.export(
        network, (rows[:3],), str(run.output / "model.onnx"), input_names=["image"], output_names=["logits"],
        dynamic_shapes=({0: batch},), dynamo=True, external_data=False, opset_version=20, verbose=False,
    )  # fmt: skip
    chances = torch.softmax(network(rows), dim=1).numpy()
    np.savez(run.output / "golden.npz", image=rows.numpy(), probabilities=chances)
    run.leave_metrics({"test_accuracy": accuracy(network)})


if __name__ == "__main__":
    main()
