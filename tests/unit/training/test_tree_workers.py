"""XGBoost on two Dask workers: here on the CPU, by the same code that gives each worker a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from serin.errors import Preempted
from serin.formats.shards import SplitArrays
from serin.formats.trained import read_trained
from serin.models.trees import load_xgboost
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.data.tree_matrix import Share, features_on, shared_parts
from serin.training.launch import launcher
from serin.training.launch.job import TrainingJob, training_file
from serin.training.programs import trees
from tests.fakes.datasets import make_dataset
from tests.unit.training.runs import records

MODEL = ModelSpec(kind="xgboost", rounds=120, options={"max_depth": 3})


def job_for(folder: Path, dataset: Path, processes: int, **training: object) -> TrainingJob:
    made = make_dataset(dataset) if not dataset.exists() else None
    job = TrainingJob(
        model=MODEL,
        training=TrainingSpec.model_validate(training),
        dataset=str(dataset),
        dataset_digest=made.digest if made else "",
        processes=processes,
        gpu=False,
    )
    folder.mkdir()
    training_file(folder).write_text(job.model_dump_json())
    return job


class Once:
    """Asks to stop as soon as a round was saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> bool:
        return any((self.folder / "checkpoints").glob("step-*/COMPLETE"))


def test_two_workers_stop_together_and_one_continues_their_trees(tmp_path: Path) -> None:
    alone = job_for(tmp_path / "alone", tmp_path / "dataset", 1, patience=120)
    trees.train(alone, tmp_path / "alone", lambda: False)

    folder = tmp_path / "two"
    job = job_for(folder, tmp_path / "dataset", 2, checkpoint_every_steps=2, patience=120)
    with pytest.raises(Preempted) as stopped:
        trees.train(job, folder, Once(folder))
    rounds = stopped.value.fields["step"]
    status = trees.train(alone, folder, lambda: False)

    assert status.state == "done"
    assert not (folder / "stop-asked").exists()
    notes = [record["text"] for record in records(folder, "note")]
    assert any("by 2 workers" in text for text in notes)
    assert any(f"resumed after round {rounds}" in text for text in notes)
    one, two = (launcher._checkpoint(place).metrics["test_auc"] for place in (tmp_path / "alone", folder))
    print(f"AUC of one process {one}, of two workers for the first {rounds} rounds {two}")
    assert rounds >= 2
    assert two == pytest.approx(one, abs=0.01)
    booster = load_xgboost().Booster(model_file=bytearray(read_trained(folder / "result")[1]))
    assert booster.num_boosted_rounds() == launcher._checkpoint(folder).step


def test_the_settings_of_two_workers_are_not_those_of_one(tmp_path: Path) -> None:
    one = job_for(tmp_path / "one", tmp_path / "dataset", 1)
    two = one.model_copy(update={"processes": 2})
    assert two.differences(one) == ["processes: 2 -> None"]
    assert one.differences(two) == ["processes: None -> 2"]
    assert one.digest != two.digest


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_hold_every_row_once_over_all_parts(count: int) -> None:
    sizes = (5, 5, 3)
    arrays = SplitArrays(
        num=tuple(np.zeros((size, 1), np.float32) for size in sizes),
        cat=tuple(np.zeros((size, 1), np.int32) for size in sizes),
        target=tuple(np.arange(start, start + size) for start, size in zip((0, 5, 10), sizes, strict=True)),
        rows=tuple(np.arange(size) for size in sizes),
    )
    shares = [
        [row for _, _, target in shared_parts(arrays, Share(index=index, count=count)) for row in target]
        for index in range(count)
    ]
    assert list(itertools.chain(*shares)) == list(range(13))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_codes_follow_the_numbers_as_float32() -> None:
    found = features_on("cpu")(np.ones((2, 1), np.float32), np.array([[7], [9]], np.int32))
    assert found.dtype == np.float32
    assert found.tolist() == [[1.0, 7.0], [1.0, 9.0]]
