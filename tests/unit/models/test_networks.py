"""The other networks: any mix of columns in, one row of outputs per row out, and a graph that answers alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serin.errors import SpecError
from serin.export.convert.torch2onnx import torch2onnx
from serin.formats.shards import SplitArrays
from serin.models.build import build_model
from serin.models.numbers import Numbers, fit_numbers
from serin.models.shape import TableShape
from serin.models.tabm import mean_probability
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.training.parallel.losses import loss_of
from tests.fakes.small_pipeline import small_spec


@pytest.mark.parametrize("kind", ["dcn", "ft_transformer", "tabm"])
@pytest.mark.parametrize(
    ("numeric", "sizes"), [(3, (5, 7)), (0, (5, 7)), (3, ())], ids=["both", "cat", "num"]
)
def test_a_network_answers_with_one_row_of_outputs_per_row(
    kind: str, numeric: int, sizes: tuple[int, ...]
) -> None:
    shape = TableShape(numeric=numeric, sizes=sizes, outputs=2)
    network = build_model(ModelSpec(kind=kind, hidden=(8,)), shape)  # type: ignore[arg-type]
    network.eval()
    scores = network(torch.randn(4, numeric), torch.zeros(4, len(sizes), dtype=torch.int64))
    assert scores.shape == (4, 2)


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        ({"kind": "dcn", "numeric_embedding": "piecewise_linear"}, 1),
        ({"kind": "ft_transformer", "numeric_scaling": "robust"}, 1),
        ({"kind": "mlp", "ensemble_size": 3}, 1),
        ({"kind": "tabm", "members": 3, "numeric_scaling": "robust", "numeric_embedding": "periodic"}, 3),
    ],
    ids=["dcn", "ft_transformer", "ensemble", "tabm"],
)
def test_a_network_becomes_a_graph_that_answers_alike(model: dict[str, Any], outputs: int) -> None:
    shape = TableShape(numeric=3, sizes=(5, 7), outputs=outputs, units=outputs == 1)
    network = build_model(ModelSpec(hidden=(8,), dropout=0.1, **model), shape)
    network.get_buffer("scale").fill_(3.0)
    fit_numbers(network, _split(np.random.default_rng(1).normal(size=(500, 3)) * 100))
    assert torch2onnx(network, shape).graph.output[0].name == "logits"


def _split(num: np.ndarray) -> SplitArrays:
    rows = len(num)
    return SplitArrays(
        num=(num.astype(np.float32),),
        cat=(np.zeros((rows, 2), np.int32),),
        target=(np.zeros(rows, np.float32),),
        rows=(np.arange(rows),),
    )


def test_robust_scaling_bounds_outliers_and_keeps_the_order() -> None:
    num = np.concatenate([np.random.default_rng(0).normal(50, 4, 4000), [1e9]])[:, None]
    scaling = Numbers(1, robust=True, embedding="none")
    scaling.fit(num.astype(np.float32))
    found = scaling(torch.tensor([[50.0], [55.4], [200.0], [1e9]]))[:, 0]
    assert found[0].abs() < 0.05
    assert 0.9 < found[1] < 1.05  # the quartiles are 5.4 apart
    assert found[1] < found[2] <= found[3] <= 3.0


def test_piecewise_linear_vectors_are_linear_between_quantiles_and_flat_outside() -> None:
    layer = Numbers(2, robust=False, embedding="piecewise_linear")
    layer.fit(np.stack([np.arange(1601.0), np.arange(1601) % 2], axis=1).astype(np.float32))
    rows = torch.tensor([[100.0, 0.0], [125.0, 0.5], [150.0, 1.0], [1600.0, 1.0], [9999.0, 1.0]])
    found = layer(rows).unflatten(1, (2, -1))
    torch.testing.assert_close(found[1], (found[0] + found[2]) / 2)
    assert not torch.equal(found[0, 0], found[2, 0])
    torch.testing.assert_close(found[3, 0], found[4, 0])
    assert not torch.equal(found[0, 1], found[2, 1])  # a column of two values has one bin


def test_a_constant_column_stays_finite() -> None:
    for embedding in ("none", "periodic", "piecewise_linear"):
        layer = Numbers(1, robust=True, embedding=embedding)  # type: ignore[arg-type]
        layer.fit(np.full((50, 1), 7, np.float32))
        assert torch.isfinite(layer(torch.tensor([[7.0], [8.0]]))).all()


@pytest.mark.parametrize("outputs", [1, 4])
def test_tabm_answers_with_the_mean_of_its_members_probabilities(outputs: int) -> None:
    shape = TableShape(numeric=3, sizes=(5,), outputs=outputs)
    network = build_model(ModelSpec(kind="tabm", hidden=(8, 8), members=5), shape)
    num, cat = torch.randn(6, 3) * 5, torch.zeros(6, 1, dtype=torch.int64)
    each, answer = network(num, cat).detach(), network.eval()(num, cat).detach()
    assert each.shape == (6, 5, outputs)
    assert len({float(member) for member in each[0, :, 0]}) == 5
    chance = torch.sigmoid if outputs == 1 else lambda logits: torch.softmax(logits, dim=-1)
    torch.testing.assert_close(chance(answer), chance(each).mean(dim=1))
    far = mean_probability(torch.full((1, 3, 1), 200.0))
    torch.testing.assert_close(far, torch.full((1, 1), 200.0))  # no infinity where a probability rounds to 1


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_members_learn_each_by_itself_and_answer_by_their_mean(task: str) -> None:
    shape = TableShape(
        numeric=3, sizes=(5, 7), outputs=4 if task == "multiclass" else 1, units=task == "regression"
    )
    network = build_model(ModelSpec(hidden=(8,), ensemble_size=3), shape)
    network.get_buffer("scale").fill_(2.0)
    network.get_buffer("shift").fill_(5.0)
    rows = (torch.randn(6, 3), torch.tensor([[0, 0], [4, 6], [1, 2], [3, 3], [2, 5], [0, 1]]))
    target = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    learning, answer = network(*rows), network.eval()(*rows)
    alone = [member(*rows) for member in network.get_submodule("members").children()]
    alone = [2 * one + 5 for one in alone] if task == "regression" else alone
    assert len({one[0, 0].item() for one in alone}) == 3
    torch.testing.assert_close(learning, torch.stack(alone, dim=1))
    torch.testing.assert_close(answer, torch.stack(alone).mean(dim=0))
    loss = loss_of(task)  # type: ignore[arg-type]
    torch.testing.assert_close(
        loss(learning, target), torch.stack([loss(one, target) for one in alone]).mean()
    )


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"ensemble_size": 0}}, "model.ensemble_size: Input should be greater than or equal to 1"),
        (
            {"model": {"kind": "xgboost", "ensemble_size": 2}},
            "model.ensemble_size: model.kind xgboost does not use it: set model.options.num_parallel_tree",
        ),
        (
            {"model": {"ensemble_size": 2}, "training": {"prune": {}}},
            "cuts one network, not model.ensemble_size=2",
        ),
        (
            {"model": {"ensemble_size": 2}, "training": {"strategy": "pipeline"}},
            "run side by side, not one after",
        ),
    ],
)
def test_members_that_cannot_be_are_refused(
    tmp_path: Path, sections: dict[str, dict[str, Any]], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec(small_spec(tmp_path, rows=10, **sections))
