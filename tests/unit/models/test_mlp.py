"""The network: shapes, the shared embedding table, and its way to disk and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serin.errors import CheckpointBroken, FormatOutdated
from serin.formats.weights import read_weights, write_weights
from serin.models.build import build_model, load_model
from serin.models.shape import TableShape
from serin.models.table import auto_embedding
from serin.spec.model import ModelSpec

SHAPE = TableShape(numeric=3, sizes=(5, 7), outputs=2)
SMALL = ModelSpec(hidden=(8,))


def write(folder: Path, network: torch.nn.Module, spec: ModelSpec = SMALL) -> None:
    shape = {"numeric": SHAPE.numeric, "sizes": SHAPE.sizes, "outputs": SHAPE.outputs}
    model = {"model": spec.model_dump(), "shape": shape, "task": "multiclass"}
    write_weights(folder, network.state_dict(), model)


@pytest.mark.parametrize(
    ("numeric", "sizes", "outputs"), [(3, (5, 7), 1), (0, (5, 7), 3), (3, (), 1)], ids=["both", "cat", "num"]
)
def test_a_network_answers_with_one_row_of_outputs_per_row(
    numeric: int, sizes: tuple[int, ...], outputs: int
) -> None:
    network = build_model(ModelSpec(hidden=(8,)), TableShape(numeric=numeric, sizes=sizes, outputs=outputs))
    scores = network(torch.randn(4, numeric), torch.zeros(4, len(sizes), dtype=torch.int64))
    assert scores.shape == (4, outputs)
    assert scores.dtype == torch.float32


def test_a_table_without_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="without feature columns"):
        TableShape(numeric=0, sizes=(), outputs=1)


def test_each_categorical_column_has_its_own_rows_of_the_shared_table() -> None:
    network = build_model(ModelSpec(hidden=(8,)), SHAPE)
    network(torch.zeros(1, 3), torch.tensor([[4, 0]])).sum().backward()
    (weight,) = [value for name, value in network.named_parameters() if name == "categories.weight"]
    assert weight.grad is not None
    touched = weight.grad.abs().sum(dim=1).nonzero().flatten().tolist()
    assert touched == [4, 5]  # the last code of the first column, the first of the second


@pytest.mark.parametrize(("largest", "width"), [(2, 4), (10, 4), (4000, 16), (1_000_000, 32)])
def test_embeddings_grow_slowly_with_the_vocabulary(largest: int, width: int) -> None:
    assert auto_embedding([2, largest]) == width


def test_the_seed_decides_the_weights() -> None:
    networks = []
    for _ in range(2):
        torch.manual_seed(11)
        networks.append(build_model(ModelSpec(), SHAPE))
    first, second = (network.state_dict() for network in networks)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_written_network_scores_as_before(tmp_path: Path) -> None:
    network = build_model(ModelSpec(hidden=(8,)), SHAPE).eval()
    write(tmp_path, network)
    rows = (torch.randn(6, 3), torch.tensor([[0, 0], [4, 6], [1, 2], [3, 3], [2, 5], [0, 1]]))
    assert torch.equal(load_model(tmp_path)(*rows), network(*rows))
    assert read_weights(tmp_path).model.task == "multiclass"


def test_weights_of_another_run_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, build_model(ModelSpec(hidden=(8,)), SHAPE))
    description = (tmp_path / "model.json").read_text()
    write(tmp_path, build_model(ModelSpec(hidden=(8,)), SHAPE))
    (tmp_path / "model.json").write_text(description)
    with pytest.raises(CheckpointBroken, match="does not match the digest"):
        read_weights(tmp_path)


@pytest.mark.parametrize("change", [{"version": 9}, {"surprise": 1}])
def test_a_description_of_another_kind_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write(tmp_path, build_model(ModelSpec(hidden=(8,)), SHAPE))
    file = tmp_path / "model.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises((CheckpointBroken, FormatOutdated), match=next(iter(change))):
        read_weights(tmp_path)


def test_weights_that_lie_in_an_older_layout_are_refused(tmp_path: Path) -> None:
    spec = ModelSpec(kind="ft_transformer", embedding=8, heads=2, blocks=1)
    write(tmp_path, build_model(spec, SHAPE), spec)
    load_model(tmp_path)
    file = tmp_path / "model.json"
    record = json.loads(file.read_text())
    del record["layout"]  # as it was written before there were two
    file.write_text(json.dumps(record))
    with pytest.raises(
        CheckpointBroken, match=r"ft_transformer have layout 1, .* reads layout 2; train it again"
    ):
        load_model(tmp_path)
