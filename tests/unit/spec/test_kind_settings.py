"""Each key of `model` and `training` is read by a kind of model, or refused when it is written for that kind."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper

import serin
from serin.errors import SpecError
from serin.pipeline.check import check_spec
from serin.spec.kind_settings import USED_BY, unused_settings
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.spec.section import Section
from serin.spec.training import TrainingSpec
from serin.training.foreign import take_over
from serin.training.launch import launcher
from serin.training.launch.job import TrainingJob
from serin.training.launch.machines import Machines
from serin.training.launch.processes import programs
from serin.training.launch.run_dir import devices_wanted
from serin.training.launch.script import prepare_script
from serin.training.programs import auto, trees
from tests.fakes.datasets import make_dataset
from tests.fakes.small_pipeline import small_spec
from tests.unit.training.runs import train_here

SECTIONS: dict[str, type[Section]] = {"model": ModelSpec, "training": TrainingSpec}
KINDS: tuple[str, ...] = get_args(ModelSpec.model_fields["kind"].annotation)
TRAINED = tuple(kind for kind in KINDS if kind != "server")  # tests/unit/spec/test_elsewhere.py has that one
OWN = {"module": "net.py:Net", "script": "train.py", "onnx": "model.onnx"}
OTHER: dict[str, Any] = {
    "model.hidden": [8], "model.embedding": 16, "model.dropout": 0.2, "model.ensemble_size": 2,
    "model.numeric_scaling": "robust", "model.numeric_embedding": "periodic", "model.members": 4,
    "model.auto": {"trials": 2},
    "model.cross_layers": 1, "model.blocks": 1, "model.heads": 4, "model.rounds": 7,
    "model.options": {"max_depth": 3}, "model.task": "multiclass", "model.answer": "probabilities",
    "model.classes": ["a", "b"], "model.golden": "rows.npz",
    "training.epochs": 9, "training.batch_rows": 64, "training.optimizer": "sgd", "training.learning_rate": 0.1,
    "training.patience": 2, "training.schedule": "constant", "training.weight_decay": 0.1, "training.clip_norm": 1.0,
    "training.seed": 5, "training.gradient_accumulation": 2, "training.class_weights": "balanced",
    "training.embedding_updates": "sparse", "training.processes": 1, "training.precision": "fp32",
    "training.processes_per_gpu": 2,
    "training.strategy": "ddp", "training.execution": "eager", "training.gradient_checkpointing": True,
    "training.checkpoint_every_steps": 3, "training.prune": {"share": 0.5},
}  # fmt: skip
"""A value of each key that is not its default. `kind` and the keys that are a kind are missing."""


def model_of(kind: str) -> dict[str, Any]:
    return {kind: OWN[kind]} if kind in OWN else {"kind": kind}


def written(folder: Path, kind: str, key: str, value: Any) -> list[str]:
    """The keys that are refused as unused in a spec that sets one."""
    section, _, name = key.partition(".")
    sections: dict[str, dict[str, Any]] = {"model": model_of(kind), "training": {}}
    sections[section] |= {name: value} | ({"task": "multiclass"} if key == "model.classes" else {})
    try:
        load_spec(small_spec(folder, rows=10, **sections))
    except SpecError as error:
        return [
            found for found, text in error.fields["problems"] if f"model.kind {kind} does not use it" in text
        ]
    return []


def test_the_table_names_every_key_and_only_kinds_that_exist() -> None:
    assert {
        f"{name}.{field}" for name, kind in SECTIONS.items() for field in kind.model_fields
    } == USED_BY.keys()
    assert {kind for kinds in USED_BY.values() for kind in kinds} == set(KINDS)
    assert OTHER.keys() == USED_BY.keys() - {"model.kind", *(f"model.{source}" for source in OWN)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_the_kind_does_not_use_is_refused_and_another_is_not(tmp_path: Path, kind: str) -> None:
    for key, value in OTHER.items():
        refused = written(tmp_path, kind, key, value)
        assert (key in refused) == (kind not in USED_BY[key]), key
        assert set(refused) <= {key, "model.task"}


@pytest.mark.parametrize("kind", TRAINED)
def test_a_resolved_spec_loads_with_all_its_keys(tmp_path: Path, kind: str) -> None:
    spec = load_spec(small_spec(tmp_path, rows=10, model=model_of(kind)))
    whole = spec.model_dump(mode="json", by_alias=True)
    assert set(whole["training"]) == set(TrainingSpec.model_fields) - {
        "processes_per_gpu"
    }  # only where it is set
    assert load_spec(whole).digest() == spec.digest()
    assert load_spec(yaml.safe_load(spec.to_yaml())) == spec


def test_all_unused_settings_are_named_at_once_with_what_to_set_instead(tmp_path: Path) -> None:
    training = {"epochs": 5, "learning_rate": 0.1, "precision": "auto", "seed": 4}  # two are the defaults
    with pytest.raises(SpecError) as caught:
        load_spec(small_spec(tmp_path, rows=10, model={"kind": "xgboost", "heads": 8}, training=training))
    other = "take it out, or choose a kind that uses it:"
    instead = {
        "model.heads": f"{other} ft_transformer",
        "training.epochs": "set model.rounds, the number of boosting rounds",
        "training.learning_rate": "set model.options.eta, the learning rate of trees",
        "training.precision": f"{other} mlp, dcn, ft_transformer, tabm, module",
    }
    expected = {key: f"model.kind xgboost does not use it: {text}" for key, text in instead.items()}
    assert dict(caught.value.fields["problems"]) == expected


def test_check_names_unused_settings_beside_what_is_wrong_with_the_data(tmp_path: Path) -> None:
    given = small_spec(tmp_path, rows=200, model={"kind": "xgboost"}, training={"epochs": 3})
    given["data"]["split"] = {"train": 2.0}
    with pytest.raises(SpecError) as caught:
        check_spec(given)
    keys = [key for key, _ in caught.value.fields["problems"]]
    assert "data.split.train" in keys
    assert keys.count("training.epochs") == 1


def test_a_search_over_kinds_takes_what_one_of_them_uses(tmp_path: Path) -> None:
    kinds = {"model.kind": {"choice": ["mlp", "xgboost"]}}
    search = {"space": {**kinds, "model.rounds": {"integer": [5, 9]}}}
    spec = load_spec(small_spec(tmp_path, rows=10, training={"epochs": 9}, search=search))
    assert not [*unused_settings(spec.model, spec.training, spec.kinds)]
    for space, key in (({"model.rounds": {"integer": [5, 9]}}, "model.rounds"),
                       ({"model.options.depth": {"integer": [5, 9]}}, "model.options.depth")):  # fmt: skip
        with pytest.raises(SpecError, match=rf"search\.space\.{key}: model\.kind mlp does not use it"):
            load_spec(small_spec(tmp_path, rows=10, search={"space": space}))


def test_another_kind_in_a_notebook_keeps_the_settings_that_it_uses(tmp_path: Path) -> None:
    pipeline = serin.Pipeline(small_spec(tmp_path, rows=10))
    other = pipeline.replace(model={"kind": "xgboost"})
    assert (other.spec.model.kind, other.spec.training.seed, other.spec.training.epochs) == ("xgboost", 3, 5)
    with pytest.raises(SpecError, match=r"training\.epochs: model\.kind xgboost does not use it"):
        pipeline.replace(model={"kind": "xgboost"}, training={"epochs": 3})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The keys that code outside the spec reads, as they are read."""
    found: set[str] = set()

    def recording(name: str, kind: type[Section]) -> Callable[[Section, str], Any]:
        def read(section: Section, field: str) -> Any:
            if field in kind.model_fields and not sys._getframe(1).f_globals["__name__"].startswith(
                "serin.spec"
            ):
                found.add(f"{name}.{field}")
            return object.__getattribute__(section, field)

        return read

    for name, kind in SECTIONS.items():
        monkeypatch.setattr(kind, "__getattribute__", recording(name, kind), raising=False)
    yield found
    monkeypatch.undo()


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, numeric, sizes, outputs, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(numeric, width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, num, cat):
        return self.layers(num)
"""
QUICK = {"epochs": 1, "batch_rows": 100, "precision": "fp32", "execution": "eager"}


@pytest.mark.parametrize("kind", TRAINED)
def test_every_key_that_a_kind_is_said_to_use_is_read_by_it(
    tmp_path: Path, reads: set[str], kind: str
) -> None:
    """A small training of each kind, in this process, and what the launcher does before and after it."""
    dataset = make_dataset(tmp_path / "data", rows={"train": 300, "valid": 100, "test": 100})
    given, training = (
        model_of(kind),
        TrainingSpec(**(QUICK if kind not in ("xgboost", "auto", "onnx") else {})),
    )
    folder = tmp_path / "run"
    folder.mkdir()
    match kind:
        case "module":
            (tmp_path / "net.py").write_text(NET)
            given = {"module": f"{tmp_path / 'net.py'}:Net", "options": {"width": 4}}
        case "onnx" | "script":
            given = {kind: str(tmp_path / OWN[kind])}
            (tmp_path / "train.py").touch()
            _linear(tmp_path / "model.onnx")
        case "xgboost":
            given["rounds"] = 3
        case "auto":
            given["auto"] = {"trials": 1}
        case "ft_transformer":
            given |= {"blocks": 1, "embedding": 8, "heads": 2}
    model = ModelSpec(**given)
    job = TrainingJob(
        model=model, training=training, dataset=dataset.path, dataset_digest="", processes=1, gpu=False
    )
    match kind:
        case "xgboost":
            trees.train(job, folder, lambda: False)
        case "auto":
            auto.train(job, folder, threading.Event())
        case "script":
            prepare_script(job, folder)
            _linear(folder / "output" / "model.onnx")
            take_over.take_over(job, folder)
        case "onnx":
            take_over.take_over(job, folder)
        case _:
            train_here(model, training, dataset, folder)
    programs(job, folder, Machines())
    launcher._job(model, training, dataset, (), folder)
    devices_wanted(model, training)
    used = {key for key, kinds in USED_BY.items() if kind in kinds}
    without_data = {"model.task", "model.classes", "model.golden"}  # read by take_over_own_inputs
    assert used - reads - without_data - {"training.prune"} == set()
    by_all = {
        "training.prune",
        "training.processes",
        "training.processes_per_gpu",
        *(f"model.{name}" for name in (*OWN, "golden", "ensemble_size")),
    }
    if kind != "auto":  # its candidates, which it trains in this process, have sections that nobody wrote
        assert reads - used - by_all == set(), "a key is read that the table says is not"


def _linear(path: Path) -> None:
    node = helper.make_node("MatMul", ["num", "w"], ["logits"])
    given = helper.make_tensor_value_info("num", TensorProto.FLOAT, ["batch", 3])
    answer = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])
    graph = helper.make_graph(
        [node], "g", [given], [answer], [numpy_helper.from_array(np.ones((3, 1), np.float32), "w")]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
