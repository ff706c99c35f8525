"""The other networks: any mix of columns in, one row of outputs per row out, and a graph that answers alike."""

from __future__ import annotations

import pytest
import torch

from serin.export.torch2onnx import torch2onnx
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.stages import ModelSpec


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


@pytest.mark.parametrize("kind", ["dcn", "ft_transformer"])
def test_a_network_becomes_a_graph_that_answers_alike(kind: str) -> None:
    shape = TableShape(numeric=3, sizes=(5, 7), outputs=1, units=True)
    network = build_model(ModelSpec(kind=kind, hidden=(8,), dropout=0.1), shape)  # type: ignore[arg-type]
    network.get_buffer("scale").fill_(3.0)
    assert torch2onnx(network, shape).graph.output[0].name == "logits"
