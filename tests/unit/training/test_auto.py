"""`model.kind: auto`: candidates of several kinds, chosen by the valid rows, served as one graph."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serin.errors import CheckpointBroken, TrainingRefused
from serin.export.convert.network import read_network
from serin.formats.dataset import read_dataset
from serin.formats.schema import Task
from serin.formats.shards import read_split
from serin.formats.trained import read_blend, write_blend
from serin.metrics import auc
from serin.models.build import open_margins
from serin.scoring.session import open_session
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.programs import auto
from serin.training.programs.auto import (
    MOST_MEMBERS,
    choose_weights,
    fold_numbers,
    may_fold,
    pooled,
    write_fold,
)
from tests.fakes.datasets import make_dataset
from tests.unit.training.runs import job_of, result

RNG = np.random.default_rng(0)
TRUTH = RNG.normal(size=400)


def goodness(margin: np.ndarray) -> float:
    return -float(np.mean((margin[:, 0] - TRUTH) ** 2))


def noisy(scale: float) -> np.ndarray:
    return (TRUTH + RNG.normal(size=400) * scale)[:, None].astype(np.float32)


def test_models_with_different_errors_are_blended_and_weights_add_up() -> None:
    weights = choose_weights({"a": noisy(1.0), "b": noisy(1.0), "bad": noisy(30.0)}, goodness)
    assert set(weights) == {"a", "b"}
    assert sum(weights.values()) == pytest.approx(1)
    assert all(weight > 0.2 for weight in weights.values())
    uneven = choose_weights({"a": noisy(0.7), "b": noisy(1.4)}, goodness)
    assert 0 < uneven["b"] < 0.4 < uneven["a"]  # a weaker one gets a small share


def test_one_model_stays_alone_when_no_other_helps_or_blends_are_off() -> None:
    assert choose_weights({"bad": noisy(30.0), "good": noisy(0.01)}, goodness) == {"good": 1.0}
    equal = {name: noisy(1.0) for name in "abc"}
    assert list(choose_weights(equal, goodness, blend=False).values()) == [1.0]


def test_a_blend_has_few_members_and_is_never_worse_than_the_best_alone() -> None:
    margins = {str(number): noisy(1.0) for number in range(8)}
    weights = choose_weights(margins, goodness)
    blended = sum(weight * margins[name] for name, weight in weights.items())
    assert len(weights) <= MOST_MEMBERS
    assert goodness(np.asarray(blended)) >= max(goodness(each) for each in margins.values())


def test_a_table_without_valid_rows_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", rows={"train": 50, "test": 20})
    job = job_of(ModelSpec(kind="auto"), TrainingSpec(), dataset)
    with pytest.raises(TrainingRefused, match="chooses by the valid rows, and there are none"):
        auto.train(job, tmp_path, threading.Event())


def test_candidates_are_trained_without_the_test_rows_and_become_one_graph(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", rows={"train": 300, "valid": 200, "test": 300})
    model = ModelSpec.model_validate({"kind": "auto", "auto": {"trials": 3}})
    run = tmp_path / "run"
    run.mkdir()
    auto.train(job_of(model, TrainingSpec(epochs=2), dataset), run, threading.Event())

    results = [run / "candidates" / name / "valid" / "result" for name in ("trees", "mlp")]
    for each in results:
        metrics = result(each.parent)["metrics"]
        assert "valid_auc" in metrics
        assert not [name for name in metrics if name.startswith("test_")]
    found = result(run)["metrics"]
    choices = json.loads((run / "result" / "state.json").read_text())["choices"]
    assert found["valid_auc"] >= max(choices["valid"].values())
    assert found["test_auc"] > 0.55
    # This split may follow time: the chosen ones are trained on its valid rows too.
    assert all(result(run / "candidates" / name / "all")["metrics"] == {} for name in choices["weights"])
    assert not (run / "folds").exists()

    rows, data = read_split(dataset.path, "test").whole(), read_dataset(dataset.path)
    num, cat = np.array(rows.num), rows.cat.astype(np.int64)
    wanted = sum(w * open_margins(p)(num, cat) for p, w in zip(results, (0.75, 0.25), strict=True))
    blend = tmp_path / "blend"
    blend.mkdir()
    shape = {"numeric": 3, "sizes": [column.size for column in data.categorical], "outputs": 1}
    record = {"model": model.model_dump(), "shape": shape, "task": "binary"}
    write_blend(blend, [(results[0], 0.75), (results[1], 0.25)], record)
    network = read_network(blend, data, tolerance=1e-4)
    (found,) = open_session(network.graph).run(["logits"], {"num": num, "cat": cat})
    assert found == pytest.approx(wanted, abs=1e-4)
    assert network.reference(num, cat) == pytest.approx(wanted, abs=1e-5)
    assert network.made_by == "XGBoost and torch"
    assert auc(np.asarray(rows.target), found[:, 0]) > 0.55

    (blend / "members" / "1" / "model.json").write_text("{}")
    with pytest.raises(CheckpointBroken, match=r"not the model of blend\.json"):
        read_blend(blend)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_folds_cover_each_row_once_with_equal_shares(tmp_path: Path, task: Task) -> None:
    dataset = make_dataset(tmp_path / "data", task=task, rows={"train": 97, "valid": 26, "test": 9})
    data, rows = read_dataset(dataset.path), pooled(dataset.path)
    numbers = fold_numbers(rows.target, task, 3, seed=1)
    assert np.bincount(numbers).tolist() == [41, 41, 41]
    for number in range(3):
        held_out = numbers == number
        write_fold(tmp_path / "fold", data, rows, held_out)
        train, valid = (read_split(tmp_path / "fold", split).whole() for split in ("train", "valid"))
        assert np.array_equal(valid.num, rows.num[held_out])
        assert np.array_equal(train.target, rows.target[~held_out])
        assert read_dataset(tmp_path / "fold").rows == {"train": 82, "valid": 41}
        assert abs(valid.target.mean() - rows.target.mean()) < 0.2 * rows.target.std()


def test_rows_stay_in_their_splits_where_moving_them_would_tell_the_answer(tmp_path: Path) -> None:
    data = read_dataset(make_dataset(tmp_path, rows={"train": 50, "valid": 20}).path)
    allowed = {
        kind: may_fold(str(tmp_path), replace(data, split_kind=kind))
        for kind in ("random", "stratified", "temporal", "group", "")
    }
    assert allowed == {"random": True, "stratified": True, "temporal": False, "group": False, "": False}
    (tmp_path / "features.json").write_text('{"operator": "target_encode"}')
    assert not may_fold(str(tmp_path), replace(data, split_kind="random"))
