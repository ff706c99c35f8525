"""The other networks: any mix of columns in, one row of outputs per row out, and a graph that answers alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serin.errors import SpecError
from serin.export.convert.torch2onnx import torch2onnx
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.training.parallel.losses import loss_of
from tests.fakes.small_pipeline import small_spec


@pytest.mark.parametrize("kind", ["dcn", "ft_transformer"])
@pytest.mark.parametrize(
    ("numeric", "sizes"), [(3, (5, 7)), (0, (5, 7)), (3, ())], ids=["both", "cat", "num"]
)
def test_a_network_answers_with_one_row_of_outputs_per_row(
    kind: str, numeric: int, sizes: tuple[int, ...]
) -> None:
    shape = TableShape(numeric=numeric, sizes=sizes, outputs=2)
    network = build_model(ModelSpec(kind=kind, hidden=(8,)), shape)  # type: ignore[arg-type]
    scores = network(torch.randn(4, numeric), torch.zeros(4, len(sizes), dtype=torch.int64))
    assert scores.shape == (4, 2)


@pytest.mark.parametrize(("kind", "ensemble_size"), [("dcn", 1), ("ft_transformer", 1), ("mlp", 3)])
def test_a_network_becomes_a_graph_that_answers_alike(kind: str, ensemble_size: int) -> None:
    shape = TableShape(numeric=3, sizes=(5, 7), outputs=1, units=True)
    spec = ModelSpec(kind=kind, hidden=(8,), dropout=0.1, ensemble_size=ensemble_size)  # type: ignore[arg-type]
    network = build_model(spec, shape)
    network.get_buffer("scale").fill_(3.0)
    assert torch2onnx(network, shape).graph.output[0].name == "logits"


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
