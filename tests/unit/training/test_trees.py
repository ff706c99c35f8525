"""XGBoost on the same shards: interrupted in every way, and on two Dask workers."""

import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from serin.errors import ExtraMissing, Preempted, TrainingRefused, WorkerFailed
from serin.formats.shards import SplitArrays, read_split
from serin.formats.trained import read_trained
from serin.models.trees import load_xgboost, margins, read_booster
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.data.tree_matrix import Share, features_on, shared_parts
from serin.training.launch import launcher
from serin.training.launch.job import TrainingJob, saved_steps, training_file
from serin.training.programs import trees
from tests.fakes.datasets import SIZES, make_dataset
from tests.signals import hit
from tests.unit.training.runs import at_the_next_checkpoint, job_of, records

SAMPLED = ModelSpec(
    kind="xgboost", rounds=120, options={"subsample": 0.7, "colsample_bynode": 0.8, "max_depth": 3}
)
PLAIN = ModelSpec(kind="xgboost", rounds=40, options={"max_depth": 3})


def job_for(model: ModelSpec, dataset: Dataset, **training: object) -> TrainingJob:
    return job_of(model, TrainingSpec.model_validate(training), dataset)


def _is_over(looks: Iterator[int]) -> bool:
    return next(looks, None) is None


def never() -> bool:
    return False


def trees_of(folder: Path) -> bytes:
    return read_trained(folder / "result")[1]


@pytest.mark.parametrize(("model", "stops"), [(SAMPLED, (70, 30)), (PLAIN, (7, 9))], ids=["sampled", "plain"])
def test_trees_that_were_asked_to_stop_end_as_those_that_were_left_alone(
    tmp_path: Path, model: ModelSpec, stops: tuple[int, ...]
) -> None:
    dataset, reference, folder = make_dataset(tmp_path / "dataset"), tmp_path / "reference", tmp_path / "run"
    reference.mkdir()
    folder.mkdir()
    job = job_for(model, dataset, seed=5)

    trees.train(job, reference, never)
    saved = []
    for stop in stops:
        with pytest.raises(Preempted) as stopped:
            trees.train(job, folder, partial(_is_over, iter(range(stop))))
        saved.append(stopped.value.fields["step"])
    status = trees.train(job, folder, never)

    print("saved at rounds", saved)
    assert saved[-1] > 0
    assert status.state == "done"
    assert trees_of(folder) == trees_of(reference)


def test_a_killed_training_resumes_before_a_damaged_checkpoint_and_ends_with_the_same_trees(
    tmp_path: Path,
) -> None:
    dataset, reference, folder = make_dataset(tmp_path / "dataset"), tmp_path / "reference", tmp_path / "run"
    reference.mkdir()
    training = TrainingSpec(checkpoint_every_steps=5)
    many = PLAIN.model_copy(update={"rounds": 200})  # so that it is not done before it can be killed

    with pytest.raises(WorkerFailed, match="SIGKILL"), at_the_next_checkpoint(folder, hit):
        launcher.train(many, training, dataset, folder=folder)
    newest = max((folder / "checkpoints").glob("step-*/COMPLETE")).parent  # not one it died in the middle of
    (newest / "trees.ubj").write_bytes((newest / "trees.ubj").read_bytes()[:-7])
    checkpoint = launcher.train(many, training, dataset, folder=folder)
    trees.train(job_for(many, dataset), reference, never)

    assert any("using the one before" in record["text"] for record in records(folder, "note"))
    assert trees_of(folder) == trees_of(reference)
    assert checkpoint.metrics["test_auc"] > 0.75
    waits = json.loads((folder / "receipt.json").read_text())["waits"]
    assert "start of the training process, with imports" in [wait["what"] for wait in waits]


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_the_metrics_are_those_of_the_trees_that_were_written(tmp_path: Path, task: str) -> None:
    dataset = make_dataset(tmp_path / "dataset", task=task)  # type: ignore[arg-type]
    folder = tmp_path / "run"
    folder.mkdir()

    trees.train(job_for(PLAIN, dataset), folder, never)

    record, content = read_trained(folder / "result")
    test = read_split(dataset.path, "test").whole()
    found = margins(read_booster(content), test.num, test.cat, SIZES)
    metrics = launcher._checkpoint(folder).metrics
    assert record.task == task
    match task:
        case "binary":
            assert metrics["test_auc"] > 0.7
        case "multiclass":
            assert metrics["test_accuracy"] == np.mean(found.argmax(axis=1) == test.target)
        case _:
            assert metrics["test_rmse"] == pytest.approx(np.sqrt(np.mean((found[:, 0] - test.target) ** 2)))


def test_a_target_of_any_size_gives_the_same_trees_in_its_own_unit(tmp_path: Path) -> None:
    errors = []
    for unit in (2.0**-30, 2.0**-12, 1.0, 2.0**40):
        dataset = make_dataset(tmp_path / str(unit) / "dataset", task="regression", unit=unit)
        folder = tmp_path / str(unit) / "run"
        folder.mkdir()
        trees.train(job_for(PLAIN, dataset), folder, never)
        errors.append(launcher._checkpoint(folder).metrics["test_rmse"] / unit)
    print(errors)
    assert errors == pytest.approx([errors[0]] * 4, rel=1e-3)


def test_it_stops_when_the_valid_rows_no_longer_gain_and_keeps_the_best_round(tmp_path: Path) -> None:
    dataset, folder = make_dataset(tmp_path / "dataset", rows={"train": 200, "valid": 200}), tmp_path / "run"
    folder.mkdir()

    status = trees.train(job_for(ModelSpec(kind="xgboost", rounds=400), dataset, patience=5), folder, never)

    best = launcher._checkpoint(folder).step
    assert best + 5 == status.step < 400
    assert read_booster(trees_of(folder)).num_boosted_rounds() == best


def test_classes_that_count_more_are_weighed(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset")
    answers = []
    for name, weights in (("plain", None), ("heavy", (1.0, 9.0))):
        (tmp_path / name).mkdir()
        trees.train(job_for(PLAIN, dataset, class_weights=weights), tmp_path / name, never)
        test = read_split(dataset.path, "test").whole()
        answers.append(margins(read_booster(trees_of(tmp_path / name)), test.num, test.cat, SIZES).mean())

    assert answers[1] > answers[0] + 0.5


def test_rows_that_xgboost_cannot_take_are_refused_with_its_words(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", poison=True)

    status = trees.train(job_for(PLAIN, dataset), tmp_path, never)

    assert status.state == "refused"
    assert "XGBoost: " in status.reason
    assert "inf" in status.reason
    with pytest.raises(TrainingRefused, match="all cores in one process"):
        launcher.train(PLAIN, TrainingSpec(processes=2), dataset, folder=tmp_path / "two")


def test_without_xgboost_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)

    with pytest.raises(ExtraMissing, match=r"pip install 'serin\[xgboost\]'"):
        trees.train(job_for(PLAIN, make_dataset(tmp_path / "dataset")), tmp_path, never)


MODEL = ModelSpec(kind="xgboost", rounds=120, options={"max_depth": 3})


def shared_job_for(folder: Path, dataset: Dataset, processes: int, **training: object) -> TrainingJob:
    job = job_of(MODEL, TrainingSpec.model_validate(training), dataset, processes=processes)
    folder.mkdir()
    training_file(folder).write_text(job.model_dump_json())
    return job


def test_two_workers_stop_together_and_one_continues_their_trees(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset")
    alone = shared_job_for(tmp_path / "alone", dataset, 1, patience=120)
    trees.train(alone, tmp_path / "alone", lambda: False)

    folder = tmp_path / "two"
    job = shared_job_for(folder, dataset, 2, checkpoint_every_steps=2, patience=120)
    with pytest.raises(Preempted) as stopped:
        trees.train(job, folder, lambda: bool(saved_steps(folder)))  # as soon as a round was saved
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
    one = job_for(MODEL, make_dataset(tmp_path / "dataset"))
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
