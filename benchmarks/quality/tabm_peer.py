"""TabM by its own package, trained as its example shows: AdamW, each member judged by itself, stopped by valid rows."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins
from tabm import TabM
from torch.nn import functional

from benchmarks.quality.learners import Data, Predict
from benchmarks.quality.score import score

_BATCH = 256
_SCORED_ROWS = 8192
_PATIENCE = 16
_MOST_EPOCHS = 256


def tabm(settings: dict[str, Any], data: Data) -> Predict:
    torch.set_num_threads(data.threads)
    torch.manual_seed(data.seed)
    network = _Network(settings, data)
    steps = torch.optim.AdamW(network.model.parameters(), lr=settings.get("lr", 2e-3), weight_decay=3e-4)
    best, kept, since, begin = float("-inf"), {}, 0, time.monotonic()
    end = begin + 0.8 * data.budget
    for _ in range(_MOST_EPOCHS):
        network.train_epoch(steps, end)
        found = score(data.valid_target, network.predict(data.valid), data.task)
        since += 1
        if found > best:
            best, since = found, 0
            kept = {name: value.clone() for name, value in network.model.state_dict().items()}
        if since >= _PATIENCE or time.monotonic() > end:
            break
    network.model.load_state_dict(kept)
    return network.predict


class _Network:
    def __init__(self, settings: dict[str, Any], data: Data) -> None:
        self._data = data
        self._numbers = [column for column in range(data.train.shape[1]) if column not in data.codes]
        self._sizes = [int(data.train[:, column].max()) + 2 for column in data.codes]
        regression = data.task == "regression"
        self._mean, self._unit = (
            (data.train_target.mean(), data.train_target.std()) if regression else (0.0, 1.0)
        )
        self._rows = self._inputs(data.train)
        self._target = torch.as_tensor(np.array((data.train_target - self._mean) / self._unit, np.float32))
        self.model = TabM.make(
            n_num_features=len(self._numbers), cat_cardinalities=self._sizes,
            d_out=data.classes if data.task == "multiclass" else 1, num_embeddings=self._embeddings(settings),
            **{key: value for key, value in settings.items() if key == "dropout"},
        )  # fmt: skip

    def _embeddings(self, settings: dict[str, Any]) -> Any:
        if not self._numbers:
            return None
        num = self._rows[0]
        varied = torch.where(num.std(dim=0) > 0, num, torch.randn_like(num))  # it refuses constant columns
        bins = compute_bins(varied, n_bins=settings.get("bins", 48))
        return PiecewiseLinearEmbeddings(bins, 16, activation=False, version="B")

    def _inputs(self, rows: np.ndarray) -> list[Any]:
        num = torch.as_tensor(np.ascontiguousarray(rows[:, self._numbers])) if self._numbers else None
        if not self._sizes:
            return [num]
        # A code that the train rows lack becomes the last one.
        known = np.minimum(rows[:, self._data.codes].astype(np.int64), np.array(self._sizes) - 1)
        return [num, torch.as_tensor(known)]

    def train_epoch(self, steps: Any, end: float) -> None:
        """Stops at the time `end`, where one epoch takes longer than the budget."""
        self.model.train()
        for rows in torch.randperm(len(self._target)).split(_BATCH):
            if time.monotonic() > end:
                break
            steps.zero_grad()
            answers = self.model(*(None if part is None else part[rows] for part in self._rows))
            self._loss(answers, self._target[rows]).backward()
            steps.step()

    def _loss(self, answers: Any, target: Any) -> Any:
        """Returns the mean over members of float[n, members, outputs]."""
        flat, same = answers.flatten(0, 1), target.repeat_interleave(answers.shape[1])
        if self._data.task == "multiclass":
            return functional.cross_entropy(flat, same.long())
        if self._data.task == "binary":
            return functional.binary_cross_entropy_with_logits(flat[:, 0], same)
        return functional.mse_loss(flat[:, 0], same)

    def predict(self, rows: np.ndarray) -> np.ndarray:
        self.model.eval()
        parts, found = self._inputs(rows), []
        with torch.inference_mode():
            for at in range(0, len(rows), _SCORED_ROWS):
                batch = (None if part is None else part[at : at + _SCORED_ROWS] for part in parts)
                answers = self.model(*batch)
                match self._data.task:
                    case "multiclass":
                        found.append(answers.softmax(dim=2).mean(dim=1))
                    case "binary":
                        found.append(answers.sigmoid().mean(dim=1)[:, 0])
                    case _:
                        found.append(answers.mean(dim=1)[:, 0] * self._unit + self._mean)
        return np.asarray(torch.cat(found).numpy())
