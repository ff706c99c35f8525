"""What the spec can ask of a training beyond its defaults, networks that are not ours, and units that can go."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from serin.errors import NetworkUnfit, StoreNotWritable, TrainingRefused
from serin.models.build import build_model, load_model
from serin.models.shape import TableShape
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.data.class_weights import class_weights
from serin.training.engine.loop import epochs_since_best, learning_rate_at
from serin.training.engine.optimizer import by_row_pays
from serin.training.engine.tuning import autotune, step_autotune
from serin.training.launch import launcher
from serin.training.parallel.gradients import loss_of
from serin.training.programs.pruning import prune
from serin.training.results import checkpoint
from serin.training.results.checkpoint import Checkpoints
from tests.fakes.datasets import make_dataset
from tests.fakes.small_pipeline import small_spec
from tests.unit.training.runs import ALONE, choices, result, train_here

SMALL = ModelSpec(hidden=(32,), embedding=8)
OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, numeric, sizes, outputs, width=8):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.layers = nn.Sequential(nn.Linear(numeric + 4 * len(sizes), width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, num, cat):
        parts = [table(cat[:, number]) for number, table in enumerate(self.tables)]
        return self.layers(torch.cat([num, *parts], dim=1))

class Hungry(Net):
    def forward(self, num, cat):
        if self.training and len(num) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(num, cat)

class Raises(Net):
    def forward(self, num, cat):
        raise KeyError("no such layer")

class Late(Net):
    def forward(self, num, cat):
        if self.training and bool(num.any()):
            raise ValueError("cannot cope with these rows")
        return super().forward(num, cat)

class Flat(Net):
    def forward(self, num, cat):
        return super().forward(num, cat)[:, 0]

def not_a_module(numeric, sizes, outputs):
    return 7
"""


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "dataset", rows={"train": 2000, "valid": 600, "test": 600})


def run(folder: Path, dataset: Dataset, model: ModelSpec = SMALL, **settings: Any) -> dict[str, Any]:
    """metrics.json of a training in this process."""
    usual = {"epochs": 2, "batch_rows": 100, "learning_rate": 3e-3, "precision": "fp32"}
    train_here(model, TrainingSpec(**{**usual, **settings}), dataset, folder)
    return result(folder)


def own(folder: Path, name: str, **options: Any) -> ModelSpec:
    (folder / "net.py").write_text(OWN)
    return ModelSpec(module=f"{folder / 'net.py'}:{name}", options=options)


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 0.01), ("sgd", 0.1), ("adagrad", 0.05)])
@pytest.mark.parametrize("updates", ["dense", "sparse"])
def test_every_optimizer_learns(
    tmp_path: Path, dataset: Dataset, optimizer: str, rate: float, updates: str
) -> None:
    settings = {"optimizer": optimizer, "learning_rate": rate, "embedding_updates": updates}
    found = run(tmp_path / "run", dataset, epochs=4, **settings)
    assert found["metrics"]["test_auc"] > 0.75
    assert choices(tmp_path / "run")["by_row"] == (updates == "sparse")


@pytest.mark.parametrize("kind", ["dcn", "ft_transformer"])
def test_every_network_learns_and_is_read_back(tmp_path: Path, dataset: Dataset, kind: str) -> None:
    model = ModelSpec(kind=kind, hidden=(32,), embedding=16, blocks=1, heads=4)  # type: ignore[arg-type]
    found = run(tmp_path / "run", dataset, model, epochs=4, learning_rate=0.01)
    assert found["metrics"]["test_auc"] > 0.8
    network = load_model(tmp_path / "run" / "result")
    assert network(torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64)).shape == (2, 1)


def test_rows_that_a_step_did_not_use_are_not_touched() -> None:
    from serin.training.engine.optimizer import Optimizer

    network = build_model(SMALL, TableShape(numeric=1, sizes=(5, 7), outputs=1))
    updates = Optimizer(network, TrainingSpec(), ALONE, by_row=True)
    updates.begin(network)
    before = network.get_parameter("categories.weight").clone()
    updates.set_rate(0.01)
    network(torch.zeros(3, 1), torch.tensor([[4, 0], [4, 0], [1, 0]])).sum().backward()
    updates.apply()
    changed = (network.get_parameter("categories.weight") != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [1, 4, 5]


@pytest.mark.parametrize(
    ("rows", "codes", "pays"), [(4_000, 6_000, False), (1_000_000, 65_536, True), (1_000_000, 600_000, False)]
)
def test_large_tables_are_updated_by_row(rows: int, codes: int, pays: bool) -> None:
    assert by_row_pays(rows, codes) is pays


def test_a_step_in_parts_learns_what_a_whole_one_does(tmp_path: Path, dataset: Dataset) -> None:
    whole, parts = run(tmp_path / "whole", dataset), run(tmp_path / "parts", dataset, gradient_accumulation=4)
    for one, other in zip(whole["epochs"], parts["epochs"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_out_of_memory_cuts_the_step_and_not_the_batch(tmp_path: Path, dataset: Dataset) -> None:
    hungry = run(tmp_path / "hungry", dataset, own(tmp_path, "Hungry"), batch_rows=128)
    frugal = run(tmp_path / "frugal", dataset, own(tmp_path, "Net"), batch_rows=128, gradient_accumulation=8)
    assert choices(tmp_path / "hungry")["parts"] == 8  # 16 rows at a time
    assert choices(tmp_path / "hungry")["batch_rows"] == 128
    assert hungry["epochs"][-1]["loss"] == pytest.approx(frugal["epochs"][-1]["loss"], abs=1e-5)
    said = (tmp_path / "hungry" / "progress.jsonl").read_text()
    assert "16 rows at a time from now on, still 128 per step" in said


def test_memory_that_ends_while_precisions_are_timed_cuts_the_step_as_well(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (autotune, step_autotune):
        monkeypatch.setattr(module, "candidates", lambda _: ("fp32", "bf16"))
    run(tmp_path / "hungry", dataset, own(tmp_path, "Hungry"), batch_rows=128, precision="auto")
    assert choices(tmp_path / "hungry")["parts"] == 8
    assert choices(tmp_path / "hungry")["precision_reason"].startswith("fp32 ")
    said = (tmp_path / "hungry" / "progress.jsonl").read_text()
    assert "16 rows at a time from now on, still 128 per step" in said


def test_one_s_own_network_is_trained_and_read_back(tmp_path: Path, dataset: Dataset) -> None:
    run(tmp_path / "run", dataset, own(tmp_path, "Net", width=16), epochs=3, learning_rate=0.01)
    network = load_model(tmp_path / "run" / "result")
    assert network(torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64)).shape == (2, 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Raises", "forward raises KeyError: 'no such layer'"),
        ("Flat", r"forward returns torch.float32\[3\] for 3 rows, expected float32\[3, 1\]"),
        ("not_a_module", "returns a int, not a torch.nn.Module"),
        ("Missing", "has no attribute 'Missing'"),
    ],
)
def test_an_unfit_network_is_refused_with_what_is_wrong(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(NetworkUnfit, match=reason):
        build_model(own(tmp_path, name), TableShape(numeric=3, sizes=(7, 40), outputs=1))


def test_a_network_that_raises_in_the_middle_is_refused_and_not_tried_again(
    tmp_path: Path, dataset: Dataset
) -> None:
    with pytest.raises(
        TrainingRefused, match="Late raises ValueError: cannot cope with these rows"
    ) as refused:
        launcher.train(own(tmp_path, "Late"), TrainingSpec(epochs=1), dataset, folder=tmp_path / "run")
    assert not refused.value.retryable


def test_a_module_needs_no_kind_and_must_name_a_class() -> None:
    assert ModelSpec(module="pkg.mod:Net").kind == "module"
    for wrong in ({"module": "pkg.mod"}, {"kind": "module"}, {"kind": "mlp", "module": "pkg.mod:Net"}):
        with pytest.raises(ValidationError):
            ModelSpec(**wrong)  # type: ignore[arg-type]


def test_it_stops_when_epochs_get_no_better_and_stays_stopped(tmp_path: Path) -> None:
    tiny = make_dataset(tmp_path / "dataset", rows={"train": 200, "valid": 800, "test": 0})
    settings = {"epochs": 60, "batch_rows": 50, "learning_rate": 0.02, "patience": 3}
    found = run(tmp_path / "run", tiny, **settings)
    aucs = [epoch["metrics"]["auc"] for epoch in found["epochs"]]
    assert len(aucs) < 60
    assert epochs_since_best(aucs) == 3
    (tmp_path / "run" / "result").rename(tmp_path / "moved")
    assert run(tmp_path / "run", tiny, **settings) == found  # resumed behind its end: nothing more to do


def test_a_plateau_halves_the_rate_and_a_constant_one_stays() -> None:
    at = {"steps": 100, "peak": 0.1}
    assert learning_rate_at(50, schedule="constant", **at) == pytest.approx(0.1)
    assert learning_rate_at(50, schedule="plateau", goodness=[0.5, 0.6], **at) == pytest.approx(0.1)
    assert learning_rate_at(50, schedule="plateau", goodness=[0.6, 0.5, 0.5], **at) == pytest.approx(0.05)
    assert learning_rate_at(0, schedule="plateau", **at) < 0.02


def test_balanced_classes_weigh_the_same_together() -> None:
    target = [np.array([0, 0, 0, 1], np.float32)]
    weights = class_weights("balanced", target, 2)
    assert weights == pytest.approx([2 / 3, 2.0])
    assert class_weights((1.0, 1.0), target, 2) == pytest.approx([1.0, 1.0])
    with pytest.raises(ValueError, match="has 3 weights, but the target has 2 classes"):
        class_weights((1.0, 2.0, 3.0), target, 2)
    weighted = loss_of("binary", weights=torch.tensor(weights))
    plain = loss_of("binary")
    logits, ones = torch.tensor([[0.3]]), torch.ones(1)
    assert float(weighted(logits, ones)) == pytest.approx(2 * float(plain(logits, ones)))


def test_what_cannot_be_compiled_runs_eagerly_and_says_why(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler(_network: object) -> None:
        raise RuntimeError("no C++ compiler found\nmore about it")

    monkeypatch.setattr(torch, "compile", no_compiler)
    tried = run(tmp_path / "tried", dataset, execution="compiled")
    assert choices(tmp_path / "tried")["execution"] == "eager"
    assert choices(tmp_path / "tried")["execution_reason"] == "cannot be compiled: no C++ compiler found"
    eager = run(tmp_path / "eager", dataset, execution="eager")
    assert tried["epochs"] == eager["epochs"], "trying changed nothing"


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = checkpoint._write_through, []

    def write_until_full(path: Path, data: bytes) -> None:
        if len(written) == 2:  # the state of the second checkpoint, after its tensors
            path.write_bytes(data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        write(path, data)

    monkeypatch.setattr(checkpoint, "_write_through", write_until_full)
    with pytest.raises(StoreNotWritable, match="No space left on device"):
        run(tmp_path / "run", dataset, epochs=5)
    monkeypatch.undo()
    saved = Checkpoints(tmp_path / "run").newest(pytest.fail)
    assert saved.position.step == 20
    whole, resumed = run(tmp_path / "whole", dataset, epochs=5), run(tmp_path / "run", dataset, epochs=5)
    assert resumed == whole


SHAPE = TableShape(numeric=3, sizes=(7, 40), outputs=2)


@pytest.mark.parametrize("kind", ["mlp", "dcn"])
def test_a_network_without_its_idle_units_answers_the_same(kind: str) -> None:
    torch.manual_seed(1)
    model = ModelSpec(kind=kind, hidden=(12, 9), dropout=0.1)  # type: ignore[arg-type]
    network = build_model(model, SHAPE).eval()
    idle = {"layers.0": (0, 3, 4, 7, 8, 11), "layers.3": (1, 2, 5, 8)}
    with torch.no_grad():
        for layer, units in idle.items():
            network.get_submodule(layer).weight[list(units)] = 0
            network.get_submodule(layer).bias[list(units)] = 0
    num, cat = torch.randn(50, 3), torch.randint(0, 7, (50, 2))

    smaller, state = prune(model, network.state_dict(), 0.5)
    cut = build_model(smaller, SHAPE).eval()
    cut.load_state_dict(state)

    assert smaller.hidden == (6, 5)
    assert torch.allclose(cut(num, cat), network(num, cat), atol=1e-6)
    assert sum(p.numel() for p in cut.parameters()) < sum(p.numel() for p in network.parameters())


def test_the_weakest_units_go_and_one_always_stays() -> None:
    torch.manual_seed(2)
    model = ModelSpec(hidden=(4,))
    network = build_model(model, SHAPE)
    with torch.no_grad():
        network.get_submodule("head").weight[:, 2] = 50.0

    smaller, state = prune(model, network.state_dict(), 0.99)

    assert smaller.hidden == (1,)
    assert torch.equal(state["layers.0.weight"], network.get_submodule("layers.0").weight[2:3])
    assert state["head.weight"].shape == (2, 1)


def test_what_has_no_hidden_layers_is_not_pruned(tmp_path) -> None:  # type: ignore[no-untyped-def]
    given = small_spec(tmp_path, rows=300, model={"kind": "xgboost"}, training={"prune": {"share": 0.5}})

    with pytest.raises(Exception, match=r"training\.prune: model\.kind xgboost does not use it.*mlp, dcn"):
        load_spec(given)
