"""The pure parts: learning rate, rows per step, precision, what makes two trainings the same."""

from __future__ import annotations

import pytest
import torch

from serin.spec.stages import ModelSpec, TrainingSpec
from serin.training.batch_size import choose_batch_rows, choose_threads
from serin.training.evaluate import goodness
from serin.training.job import TrainingJob
from serin.training.precision import choose_precision
from serin.training.schedule import learning_rate_at


def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_nearly_nothing() -> None:
    rates = [learning_rate_at(step, steps=1000, peak=0.1) for step in range(1000)]
    assert 0 < rates[0] < 0.01
    assert max(rates) == rates[50] == pytest.approx(0.1)
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert 0 < rates[-1] < 1e-5


def test_a_single_step_is_done_at_the_peak() -> None:
    assert learning_rate_at(0, steps=1, peak=0.1) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("wanted", "rows", "ranks", "device", "expected"),
    [
        ("auto", 260_000, 1, "cpu", 1024),  # about two hundred steps an epoch
        ("auto", 4_000, 1, "cpu", 256),  # small tables: not too few rows for a gradient
        ("auto", 100, 1, "cpu", 100),  # never more than there are
        ("auto", 50_000_000, 1, "cpu", 8192),
        ("auto", 50_000_000, 1, "cuda", 65536),
        ("auto", 50_000_000, 4, "cuda", 131072),  # ranks share the step
        ("auto", 260_000, 3, "cpu", 1026),  # rounded up to divide
        (1000, 260_000, 2, "cpu", 1000),
        (1000, 301, 2, "cpu", 300),
        (64, 1, 2, "cpu", 0),  # one row cannot feed two ranks
    ],
)
def test_rows_per_step(wanted: int | str, rows: int, ranks: int, device: str, expected: int) -> None:
    assert choose_batch_rows(wanted, rows=rows, ranks=ranks, device=device) == expected  # type: ignore[arg-type]


def test_small_steps_get_one_thread_and_large_ones_all_cores() -> None:
    assert [choose_threads(products, cores=4) for products in (10_000, 30_000_000, 10**10)] == [1, 3, 4]


def test_a_cpu_computes_in_fp32_unless_it_is_told_otherwise() -> None:
    cpu = torch.device("cpu")
    assert choose_precision("auto", cpu) == "fp32"
    assert choose_precision("bf16", cpu) == "bf16"


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"auc": 0.7, "logloss": 0.1}, {"auc": 0.8, "logloss": 0.2}),
        ({"logloss": 0.2, "accuracy": 0.9}, {"logloss": 0.1, "accuracy": 0.8}),
        ({"rmse": 4.0}, {"rmse": 3.0}),
    ],
)
def test_the_best_epoch_is_the_one_with_the_better_leading_metric(worse: dict, better: dict) -> None:
    assert goodness(better) > goodness(worse)


def job(**changes: object) -> TrainingJob:
    training = TrainingSpec(**changes)  # type: ignore[arg-type]
    return TrainingJob(
        model=ModelSpec(), training=training, dataset="/d", dataset_digest="d", processes=1, gpu=False
    )


def test_what_changes_the_weights_makes_another_training() -> None:
    assert job().differences(job(seed=1, epochs=9)) == ["training.epochs: 5 -> 9", "training.seed: 0 -> 1"]


def test_what_only_changes_how_a_run_goes_does_not() -> None:
    assert job().differences(job(checkpoint_every_steps=3, processes=2)) == []
