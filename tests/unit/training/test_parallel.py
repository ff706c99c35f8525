"""Two ranks on gloo: they learn what one process learns, however the network is shared out, stop together, and leave
checkpoints that any other number of ranks can take up in any other way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serin.errors import Preempted
from serin.formats.weights import read_weights
from serin.models.stages import assign_stages
from serin.store.artifacts import Dataset
from tests.fakes.datasets import make_dataset
from tests.unit.training.parallel_cases import (
    CASES,
    TOLERANCE,
    TRANSFORMER,
    choices,
    difference,
    job,
    train,
    train_all,
)
from tests.unit.training.ranks import run_ranks, train_several


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("dataset")
    return make_dataset(folder / "dataset", rows={"train": 600, "valid": 301, "test": 200})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> Path:
    """Every case by one process and by two."""
    folder = tmp_path_factory.mktemp("trained")
    train_all(folder, dataset, CASES)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_loss_curve_of_one(trained: Path, name: str) -> None:
    found = difference(trained / f"{name}-1", trained / f"{name}-2")
    print("largest difference of an epoch's loss", found)
    assert found < (5e-3 if "fp16" in name else TOLERANCE)
    assert choices(trained / f"{name}-2")["strategy"] == CASES[name].two["strategy"]


@pytest.mark.parametrize("name", ["tensor", "pipeline-transformer"])
def test_what_is_cut_is_put_together_in_the_result(trained: Path, name: str) -> None:
    one, two = (read_weights(trained / f"{name}-{ranks}" / "result").state for ranks in (1, 2))
    assert {name: tensor.shape for name, tensor in one.items()} == {
        name: tensor.shape for name, tensor in two.items()
    }
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-2
    metrics = [
        json.loads((trained / f"{name}-{ranks}" / "result" / "metrics.json").read_text())["metrics"]
        for ranks in (1, 2)
    ]
    assert metrics[0] == pytest.approx(metrics[1], abs=2e-3)


def test_ranks_of_fsdp_that_were_stopped_end_with_the_same_weights(tmp_path: Path, dataset: Dataset) -> None:
    """One rank alone is asked; both save and stop at the same step, and go on from there."""
    sharded = job(tmp_path, dataset, 2, {}, strategy="fsdp", checkpoint_every_steps=3)
    assert train(sharded, tmp_path / "run", stop_at=1) == [Preempted.exit_code] * 2
    jobs = {"run": sharded, "whole": job(tmp_path, dataset, 2, {}, strategy="fsdp")}
    done = run_ranks(
        2, train_several, {name: made.model_dump_json() for name, made in jobs.items()}, tmp_path
    )
    assert done == [0, 0]
    ours, theirs = (read_weights(tmp_path / name / "result").state for name in jobs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_resumes_with_other_ranks_and_another_strategy_and_its_batch(
    tmp_path: Path, dataset: Dataset, trained: Path
) -> None:
    """Tensor parallel, stopped; then a pipeline, stopped; then one process to the end."""
    settings = {"clip_norm": 0.5, "checkpoint_every_steps": 3}
    folder = tmp_path / "run"
    for strategy in ("tensor", "pipeline"):
        made = job(tmp_path, dataset, 2, TRANSFORMER, strategy=strategy, **settings)
        assert train(made, folder, stop_at=1) == [Preempted.exit_code] * 2
    assert train(job(tmp_path, dataset, 1, TRANSFORMER, **settings), folder) == [0]
    assert choices(folder)["batch_rows"] == 100
    assert difference(folder, trained / "pipeline-transformer-1") < TOLERANCE
    started = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    resumed = [(record["ranks"], record["strategy"]) for record in started if record["event"] == "started"]
    assert resumed == [(2, "tensor"), (2, "pipeline"), (1, "ddp")]


def test_out_of_memory_of_several_ranks_is_resumed_with_smaller_parts(
    tmp_path: Path, dataset: Dataset
) -> None:
    """What one rank cannot hold ends all; the next start has the same batch in smaller parts."""
    hungry = job(tmp_path, dataset, 2, {"module": "Hungry"}, batch_rows=100, strategy="ddp")
    assert 0 not in train(hungry, tmp_path / "run")
    assert choices(tmp_path / "run")["parts"] == 2
    assert train(hungry, tmp_path / "run") == [0, 0]
    assert choices(tmp_path / "run")["batch_rows"] == 100
    frugal = job(tmp_path, dataset, 1, {"module": "Net"}, batch_rows=100)
    assert train(frugal, tmp_path / "whole") == [0]
    assert difference(tmp_path / "run", tmp_path / "whole") < TOLERANCE


@pytest.mark.parametrize(
    ("sizes", "ranks", "shares"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([10, 1, 1, 1, 1], 2, [1, 4]),
        ([3, 5, 5, 3, 1], 3, [2, 1, 2]),
        ([4], 1, [1]),
    ],
)
def test_stages_are_shared_so_that_the_heaviest_rank_has_least(
    sizes: list[int], ranks: int, shares: list[int]
) -> None:
    assert [len(share) for share in assign_stages(sizes, ranks)] == shares


def test_fewer_stages_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 stages do not fill 3 processes"):
        assign_stages([1, 1], 3)
