"""ONNX models that others made, brought into the one form; what cannot be is refused in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from serin.errors import ModelUnfit
from serin.formats.schema import Task
from serin.models.foreign.own_graph import as_network, load_graph
from serin.models.foreign.run_graph import RunningGraph
from serin.models.shape import TableShape

SHAPE = TableShape(numeric=2, sizes=(5,), outputs=1)
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
    tmp_path: Path, model: onnx.ModelProto, *, shape: TableShape = SHAPE, task: Task = "binary", **how: object
) -> np.ndarray:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    graph = as_network(
        load_graph(path, "model.onnx x"), shape, task, what="model.onnx x", **{"answer": "logits", **how}
    )
    (logits,) = RunningGraph(graph, "x").ask(
        {"num": NUM[:, : shape.numeric], "cat": CAT[:, : len(shape.sizes)]}, ["logits"]
    )
    return logits


WANTED = NUM @ WEIGHTS.astype(np.float32)


@pytest.mark.parametrize(
    "model",
    [linear(), linear(opset=13), linear(element=TensorProto.DOUBLE), linear(output="dense_2")],
    ids=["named", "old opset", "float64", "another name for the answer"],
)
def test_what_fits_answers_as_it_did(tmp_path: Path, model: onnx.ModelProto) -> None:
    assert taken(tmp_path, model) == pytest.approx(WANTED)


def test_the_only_input_may_have_any_name(tmp_path: Path) -> None:
    alone = TableShape(numeric=2, sizes=(), outputs=1)

    assert taken(tmp_path, linear(name="dense_input"), shape=alone) == pytest.approx(WANTED)


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
