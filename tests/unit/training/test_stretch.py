"""Several steps at a time: the same rows, rates and losses as one by one, and no event of the loop is missed.

On a GPU they are one CUDA graph; here eager steps stand in for it, one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serin.errors import Preempted
from serin.spec.training import TrainingSpec
from serin.training.data.loader import Loader
from serin.training.engine import loop
from serin.training.engine.cuda_graphs import GraphedSteps
from serin.training.engine.learner import Learner
from serin.training.engine.tuning.step_autotune import TunedStep, ready_step
from tests.fakes.datasets import make_dataset
from tests.unit.training.runs import MODEL, records, train_here
from tests.unit.training.test_loader import loader

CPU = torch.device("cpu")


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
