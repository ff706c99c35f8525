"""Networks and ONNX models of others: any mix of columns in, one row of outputs per row out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from serin.errors import CheckpointBroken, ModelUnfit, SpecError
from serin.export.convert.torch2onnx import torch2onnx
from serin.formats.schema import Task
from serin.formats.shards import SplitArrays
from serin.formats.weights import read_weights, write_weights
from serin.models.build import build_model, load_model, mean_probability
from serin.models.foreign.own_graph import as_network, load_graph
from serin.models.numbers import Numbers, fit_numbers
from serin.models.shape import TableShape
from serin.models.table import auto_embedding
from serin.scoring.session import open_session
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.training.parallel.gradients import loss_of
from tests.fakes.small_pipeline import small_spec


@pytest.mark.parametrize("kind", ["mlp", "dcn", "ft_transformer", "tabm"])
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
    assert scores.dtype == torch.float32


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
    ],
)
def test_members_that_cannot_be_are_refused(
    tmp_path: Path, sections: dict[str, dict[str, Any]], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec(small_spec(tmp_path, rows=10, **sections))


SHAPE = TableShape(numeric=3, sizes=(5, 7), outputs=2)
SMALL = ModelSpec(hidden=(8,))


def write(folder: Path, network: torch.nn.Module, spec: ModelSpec = SMALL) -> None:
    shape = {"numeric": SHAPE.numeric, "sizes": SHAPE.sizes, "outputs": SHAPE.outputs}
    model = {"model": spec.model_dump(), "shape": shape, "task": "multiclass"}
    write_weights(folder, network.state_dict(), model)


def test_a_table_without_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="without feature columns"):
        TableShape(numeric=0, sizes=(), outputs=1)


def test_each_categorical_column_has_its_own_rows_of_the_shared_table() -> None:
    network = build_model(ModelSpec(hidden=(8,)), SHAPE)
    network(torch.zeros(1, 3), torch.tensor([[4, 0]])).sum().backward()
    (weight,) = [value for name, value in network.named_parameters() if name == "categories.weight"]
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


_UNDRAWN = """
import resource, sys
from serin.models.build import undrawn_model
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for kind in ("mlp", "dcn", "ft_transformer", "tabm"):
    shape = TableShape(numeric=3, sizes=(20_000_000, 7), outputs=1)
    undrawn_model(ModelSpec(kind=kind, embedding=16), shape)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, "torch._dynamo" in sys.modules)
"""


def test_large_tables_take_no_memory_before_they_are_loaded_and_import_no_compiler() -> None:
    said = subprocess.run([sys.executable, "-c", _UNDRAWN], capture_output=True, text=True, check=True)
    megabytes, compiler = said.stdout.split()
    assert (int(megabytes) < 100, compiler) == (True, "False")


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
    with pytest.raises(CheckpointBroken, match=next(iter(change))):
        read_weights(tmp_path)


OWN_SHAPE = TableShape(numeric=2, sizes=(5,), outputs=1)
NUM = np.array([[1.0, 2.0], [-3.0, 0.5], [0.0, 0.0]], np.float32)
CAT = np.array([[0], [4], [2]], np.int64)
WEIGHTS = np.array([[0.5], [0.25]])


def linear(
    *,
    name: str = "num",
    output: str = "logits",
    last: str = "Identity",
    element: int = TensorProto.FLOAT,
    columns: int = 2,
    outputs: int = 1,
    opset: int = 17,
) -> onnx.ModelProto:
    kind = helper.tensor_dtype_to_np_dtype(element)
    weights = numpy_helper.from_array(np.resize(WEIGHTS, (columns, outputs)).astype(kind), "w")
    nodes = [helper.make_node("MatMul", [name, "w"], ["product"])]
    if element != TensorProto.FLOAT:
        nodes.append(helper.make_node("Cast", ["product"], ["cast"], to=TensorProto.FLOAT))
    nodes.append(helper.make_node(last, [nodes[-1].output[0]], [output]))
    given = helper.make_tensor_value_info(name, element, ["n", columns])
    answer = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", outputs])
    graph = helper.make_graph(nodes, "g", [given], [answer], [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def taken(
    tmp_path: Path,
    model: onnx.ModelProto,
    *,
    shape: TableShape = OWN_SHAPE,
    task: Task = "binary",
    **how: object,
) -> np.ndarray:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    graph = as_network(
        load_graph(path, "model.onnx x"), shape, task, what="model.onnx x", **{"answer": "logits", **how}
    )
    feed = {"num": NUM[:, : shape.numeric], "cat": CAT[:, : len(shape.sizes)]}
    (logits,) = open_session(graph).run(["logits"], feed)
    return np.asarray(logits)


WANTED = NUM @ WEIGHTS.astype(np.float32)


@pytest.mark.parametrize(
    "model",
    [linear(), linear(opset=13), linear(element=TensorProto.DOUBLE), linear(output="dense_2")],
    ids=["named", "old opset", "float64", "another name for the answer"],
)
def test_what_fits_answers_as_it_did(tmp_path: Path, model: onnx.ModelProto) -> None:
    assert taken(tmp_path, model) == pytest.approx(WANTED)
    alone = TableShape(numeric=2, sizes=(), outputs=1)
    assert taken(tmp_path, linear(name="dense_input"), shape=alone) == pytest.approx(WANTED), "the only input"


def test_probabilities_are_taken_back_to_logits(tmp_path: Path) -> None:
    one = taken(tmp_path, linear(last="Sigmoid", output="p"), answer="probabilities")
    pair = taken(tmp_path, linear(last="Softmax", output="p", outputs=2), answer="probabilities")
    three = taken(
        tmp_path, linear(last="Softmax", outputs=3), answer="probabilities", task="multiclass",
        shape=TableShape(numeric=2, sizes=(5,), outputs=3),
    )  # fmt: skip

    both = NUM @ np.resize(WEIGHTS, (2, 2)).astype(np.float32)
    chances = np.exp(three) / np.exp(three).sum(axis=1, keepdims=True)
    logits = NUM @ np.resize(WEIGHTS, (2, 3)).astype(np.float32)
    assert one == pytest.approx(WANTED, abs=1e-5)
    assert pair == pytest.approx(both[:, 1:] - both[:, :1], abs=1e-5)
    assert chances == pytest.approx(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), abs=1e-6)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (linear(name="pixels"), r"needs \['pixels'\], but the dataset has num"),
        (linear(columns=3), "input num has 3 columns, but the dataset has 2"),
        (linear(outputs=4), "output logits has 4 columns, but a binary model has 1"),
        (onnx.ModelProto(), "is not an ONNX file, or its graph is empty"),
    ],
    ids=["inputs", "columns", "outputs", "empty"],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, model: onnx.ModelProto, words: str) -> None:
    with pytest.raises(ModelUnfit, match=words):
        taken(tmp_path, model)


def test_weights_in_another_file_are_refused(tmp_path: Path) -> None:
    model, path = linear(columns=200), tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0)

    with pytest.raises(ModelUnfit, match="keeps weights in another file"):
        load_graph(path, "x")


def test_a_constant_that_names_a_file_outside_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    model, path = linear(), tmp_path / "model.onnx"
    secret = onnx.TensorProto(name="secret", data_type=onnx.TensorProto.FLOAT, dims=[1], data_location=1)
    secret.external_data.add(key="location", value="../../etc/passwd")
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["unused"], value=secret))
    path.write_bytes(model.SerializeToString())

    with pytest.raises(ModelUnfit, match="keeps weights in another file"):
        load_graph(path, "x")
