"""Checkpoints, and the pure parts: learning rate, rows per step, precision, what makes two trainings the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serin.errors import CheckpointBroken, StoreNotWritable
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import NO_DATASET
from serin.training.engine.evaluate import goodness
from serin.training.engine.loop import learning_rate_at
from serin.training.engine.precision import Precision, candidates, choose_precision, refuse_precision
from serin.training.engine.tuning.autotune import (
    TrainingMemory,
    candidate_batch_rows,
    choose_batch_rows,
    choose_strategy,
    choose_threads,
    measure_batch_rows,
    scaled_rate,
    smaller_parts,
)
from serin.training.launch.job import saved_steps
from serin.training.results.checkpoint import Checkpoints, Position
from tests.unit.training.runs import job_of


def save(folder: Path, *steps: int, best: dict[int, int] | None = None) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        position = Position(step=step, best_step=(best or {}).get(step))
        checkpoints.save(position, {"model.w": torch.full((3,), float(step))}, lambda: None)
    checkpoints.finish()
    return checkpoints


def test_the_newest_is_read_back_as_it_was(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).newest(print) is None
    saved = save(tmp_path, 10, 20).newest(print)
    assert saved.position.step == 20
    assert torch.equal(saved.tensors["model.w"], torch.full((3,), 20.0))


def test_the_last_two_and_the_best_they_know_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40, 50, best={20: 20, 30: 20, 40: 20, 50: 50})
    assert saved_steps(tmp_path) == [20, 40, 50]  # going back to 40 still needs 20


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "COMPLETE"])
def test_a_damaged_one_is_passed_over_and_said(tmp_path: Path, file: str) -> None:
    checkpoints = save(tmp_path, 10, 20)
    path = tmp_path / "checkpoints" / "step-00000020" / file
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    said: list[str] = []
    saved = checkpoints.newest(said.append)
    assert saved.position.step == 10
    assert "using the one before" in said[0]


def test_one_without_its_last_file_does_not_count_and_is_replaced(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 10, 20)
    (tmp_path / "checkpoints" / "step-00000020" / "state.json").write_text("{}")
    with pytest.raises(CheckpointBroken, match="does not match its digest"):
        checkpoints.read(20)
    (tmp_path / "checkpoints" / "step-00000020" / "COMPLETE").unlink()
    saved = checkpoints.newest(pytest.fail)
    assert saved.position.step == 10
    assert save(tmp_path, 20).read(20).position.step == 20


def test_a_failed_write_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(StoreNotWritable, match="Not a directory"):
        save(tmp_path, 10)


def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_nearly_nothing() -> None:
    rates = [learning_rate_at(step, steps=1000, peak=0.1) for step in range(1000)]
    assert 0 < rates[0] < 0.01
    assert max(rates) == rates[50] == pytest.approx(0.1)
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert 0 < rates[-1] < 1e-5
    assert learning_rate_at(0, steps=1, peak=0.1) == pytest.approx(0.1), "a single step"


@pytest.mark.parametrize(
    ("wanted", "rows", "ranks", "device", "expected"),
    [
        ("auto", 260_000, 1, "cpu", [256, 512, 1024]),  # at least two hundred steps an epoch
        ("auto", 4_000, 1, "cpu", [256]),  # small tables: not too few rows for a gradient
        ("auto", 100, 1, "cpu", [100]),  # never more than there are
        ("auto", 50_000_000, 1, "cpu", [256, 512, 1024, 2048, 4096, 8192]),
        ("auto", 260_000, 3, "cpu", [258, 513, 1026]),  # rounded up to divide
        (1000, 260_000, 2, "cpu", [1000]),
        (1000, 301, 2, "cpu", [300]),
        (64, 1, 2, "cpu", []),  # one row cannot feed two ranks
    ],
)
def test_rows_per_step_to_be_measured(
    wanted: int | str, rows: int, ranks: int, device: str, expected: list[int]
) -> None:
    found = candidate_batch_rows(wanted, rows=rows, ranks=ranks, device=device)  # type: ignore[arg-type]
    assert found == expected


def test_a_gpu_gets_larger_steps_and_each_rank_its_share() -> None:
    asked = {"rows": 50_000_000, "device": "cuda"}
    assert candidate_batch_rows("auto", ranks=1, **asked)[-1] == 65536
    assert candidate_batch_rows("auto", ranks=4, **asked)[-1] == 131072
    assert candidate_batch_rows("auto", ranks=4, limit=8192, **asked)[-1] == 4096  # did not fit
    assert candidate_batch_rows("auto", ranks=4, limit=256, **asked) == [256]  # to be cut into parts


def test_the_smallest_batch_near_the_fastest_is_taken() -> None:
    assert choose_batch_rows({256: 50.0, 512: 90.0, 1024: 96.0, 2048: 100.0})[0] == 1024
    assert choose_batch_rows({256: 100.0, 512: 90.0})[0] == 256


def test_measuring_ends_with_its_budget_and_where_nothing_fits() -> None:
    asked: list[int] = []

    def seconds(size: int) -> float | None:
        asked.append(size)
        return None if size > 1024 else 0.1 if size < 1024 else 0.15

    assert measure_batch_rows([256, 512, 1024, 2048, 4096], seconds, budget_s=9.0)[0] == 1024
    assert asked == [256, 512, 1024, 2048]
    asked.clear()
    assert measure_batch_rows([256, 512, 1024], seconds, budget_s=0.2)[0] == 256
    assert asked == [256]
    assert measure_batch_rows([4096, 8192], seconds)[0] == 4096


@pytest.mark.parametrize(
    ("rows", "optimizer", "chosen", "factor"),
    [
        (4096, "adamw", False, 1.0),  # a rate belongs to the rows that stand beside it
        (4096, "adamw", True, 2.0),
        (4096, "sgd", True, 4.0),
        (65536, "adamw", True, 4.0),
        (256, "adamw", True, 1.0),
    ],
)
def test_the_rate_follows_a_chosen_batch(rows: int, optimizer: str, chosen: bool, factor: float) -> None:
    assert scaled_rate(0.001, rows, optimizer=optimizer, chosen=chosen) == pytest.approx(0.001 * factor)


def test_small_steps_get_one_thread_and_large_ones_all_cores() -> None:
    assert [choose_threads(products, cores=4) for products in (10_000, 30_000_000, 10**10)] == [1, 3, 4]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"fp32": 1.0, "tf32": 0.98, "bf16": 0.97}, "fp32"),  # nothing gained: the most exact
        ({"fp32": 1.0, "tf32": 0.6, "bf16": 0.59}, "tf32"),
        ({"fp32": 1.0, "tf32": 0.6, "bf16": 0.4}, "bf16"),
        ({"fp32": 1.0, "bf16": 140.0}, "fp32"),  # a CPU without the instructions
        ({"fp32": 1.0, "fp16": 0.5}, "fp16"),
    ],
)
def test_a_precision_is_taken_for_its_speed_and_never_one_slower_than_fp32(
    seconds: dict[Precision, float], chosen: str
) -> None:
    assert choose_precision(seconds)[0] == chosen


def test_a_cpu_whose_cores_others_share_takes_bf16_only_when_it_is_clearly_faster() -> None:
    assert choose_precision({"fp32": 1.0, "bf16": 0.8}, on_cpu=True)[0] == "fp32"
    assert choose_precision({"fp32": 1.0, "bf16": 0.5}, on_cpu=True)[0] == "bf16"


def test_a_precision_that_the_hardware_lacks_is_refused() -> None:
    cpu = torch.device("cpu")
    assert "tf32" not in candidates(cpu)
    assert "TF32 needs a GPU" in refuse_precision("tf32", cpu)
    assert refuse_precision("bf16", cpu) == ""  # slow, but to be had


GB = 10**9
SMALL = TrainingMemory(state=GB, largest=GB // 8, device=80 * GB, ranks=4, cuts=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ddp"),
        ({"ranks": 1, "state": 200 * GB}, "ddp"),  # one process has no choice
        ({"state": 100 * GB, "largest": GB}, "fsdp"),
        ({"state": 100 * GB, "largest": 20 * GB}, "tensor"),  # a table that no device can hold whole
        ({"state": 100 * GB, "largest": 20 * GB, "cuts": False}, "fsdp"),
    ],
)
def test_the_strategy_follows_from_what_a_network_weighs(changes: dict, expected: str) -> None:
    strategy, why = choose_strategy("auto", replace(SMALL, **changes))
    assert strategy == expected
    assert why


@pytest.mark.parametrize(
    ("wanted", "changes", "by_row", "reason"),
    [
        ("tensor", {"cuts": False}, False, "this network's layers cannot be split"),
        ("fsdp", {}, True, "set embedding_updates: dense"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_with_the_reason(
    wanted: str, changes: dict, by_row: bool, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_strategy(wanted, replace(SMALL, **changes), by_row=by_row)  # type: ignore[arg-type]


@pytest.mark.parametrize(("parts", "rows", "expected"), [(1, 64, 2), (4, 64, 8), (1, 3, None), (2, 6, None)])
def test_parts_are_halved_as_long_as_they_stay_equal(parts: int, rows: int, expected: int | None) -> None:
    assert smaller_parts(parts, rows) == expected


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


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"seed": 1, "epochs": 9}, ["training.epochs: 5 -> 9", "training.seed: 0 -> 1"]),
        (  # what only changes how a run goes
            {"checkpoint_every_steps": 3, "processes": 2, "strategy": "fsdp", "gradient_checkpointing": True},
            [],
        ),
    ],
)
def test_what_changes_the_weights_makes_another_training(changes: dict, differences: list[str]) -> None:
    one, other = (job_of(ModelSpec(), TrainingSpec(**each), NO_DATASET) for each in ({}, changes))
    assert one.differences(other) == differences
