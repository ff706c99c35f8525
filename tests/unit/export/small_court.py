"""A network by hand, with an embedding table and two layers, on rows that it orders well; and all it is judged by."""

import numpy as np
import onnx
from onnx import helper

from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.export.convert.fuse import FeatureGraph
from serin.export.convert.network import Network, graph_network
from serin.export.gate.gate import GoldenRows
from serin.export.variants.context import TestRows, VariantContext
from serin.formats.schema import Schema, Task, input_columns, outputs_of
from serin.spec.export import ExportSpec

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
WIDTH, CODES, NUMBERS = 16, 100, 3


def small_network(scale: float = 1.0) -> Network:
    """Nodes: table, row, first, active, logits. `scale` multiplies the answer, as a regression's unit does."""
    random = np.random.default_rng(8)
    graph = GraphBuilder()

    def weight(*shape: int) -> str:
        return graph.constant(random.normal(0, 0.5, shape).astype(np.float32), "weight")

    def node(kind: str, name: str, *inputs: str, **attributes: int) -> str:
        graph.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    table = node("Gather", "table", weight(CODES, 4), "cat")
    flat = node("Flatten", "flat", table)
    row = node("Concat", "row", "num", flat, axis=1)
    first = node("Gemm", "first", row, weight(NUMBERS + 4, WIDTH), weight(WIDTH))
    active = node("Relu", "active", first)
    plain = node("Gemm", "plain", active, weight(WIDTH, 1), weight(1))
    node("Mul", "logits", plain, graph.constant(np.float32(scale)))
    model = graph.to_model(
        {"num": (FLOAT, ("batch", NUMBERS)), "cat": (INT64, ("batch", 1))},
        {"logits": (FLOAT, ("batch", 1))},
    )
    return graph_network(model, "hand")


def rows_of(count: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    num = random.normal(size=(count, NUMBERS)).astype(np.float32)
    return {"num": num, "cat": random.integers(0, CODES, (count, 1))}


def small_court(
    network: Network, task: Task = "binary", *, max_rows: int = 100, **asked: object
) -> VariantContext:
    graph = GraphBuilder("f/")
    num, cat = graph.op("Identity", "x"), graph.op("Identity", "c")
    fed = {
        "x": (ELEMENT_OF_DTYPE["FP32"], ("batch", NUMBERS)),
        "c": (ELEMENT_OF_DTYPE["INT64"], ("batch", 1)),
    }
    features = FeatureGraph(
        model=graph.to_model(fed, {num: (FLOAT, ("batch", NUMBERS)), cat: (INT64, ("batch", 1))}),
        num=num,
        cat=cat,
    )
    entries = [
        {"name": "x", "kind": "float", "dtype": "FP32"},
        {"name": "c", "kind": "int", "dtype": "INT64"},
    ]
    golden, test = rows_of(80, 1), rows_of(1000, 2)
    logits = network.reference(test["num"], test["cat"])[:, 0]
    scores = network.reference(golden["num"], golden["cat"])
    noise = np.random.default_rng(3).normal(0, logits.std() / 2, len(logits))
    target = logits + noise if task == "regression" else logits + noise > np.median(logits)
    return VariantContext(
        spec=ExportSpec.model_validate({"batch_mix": {1: 0.5, 64: 0.5}, **asked}),
        schema=Schema(task=task, inputs=input_columns(entries), outputs=outputs_of(task)),
        features=features,
        golden=GoldenRows(
            table=None,
            inputs={"x": golden["num"], "c": golden["cat"]},
            numeric=("a", "b", "c"),
            categorical=("d",),
            num=golden["num"],
            cat=golden["cat"].astype(np.int32),
            row=np.arange(500, 580),
        ),
        rows=TestRows(num=test["num"], cat=test["cat"], target=target.astype(np.float32)),
        max_rows=max_rows,
        scale=network.scale(scores) if task == "regression" else None,
    )


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def wrong_scale(model: onnx.ModelProto, node: str, factor: float) -> onnx.ModelProto:
    """A layer whose weights were quantised with the wrong scale: all of them times `factor`."""
    poisoned = copy_of(model)
    name = next(each for each in poisoned.graph.node if each.name == node).input[1]
    tensor = next(each for each in poisoned.graph.initializer if each.name == name)
    values = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))
    return poisoned


def wrong_from(rows: int, model: onnx.ModelProto, node: str) -> onnx.ModelProto:
    """A node whose kernel goes wrong as soon as a batch has so many rows."""
    poisoned = copy_of(model)
    graph = poisoned.graph
    place = next(index for index, each in enumerate(graph.node) if each.name == node)
    result = graph.node[place].output[0]
    graph.node[place].output[0] = f"{result}/right"
    graph.initializer.append(helper.make_tensor("limit", INT64, [1], [rows]))
    after = [
        helper.make_node("Shape", [f"{result}/right"], ["size"], end=1),
        helper.make_node("GreaterOrEqual", ["size", "limit"], ["large"]),
        helper.make_node("Cast", ["large"], ["error"], to=FLOAT),
        helper.make_node("Add", [f"{result}/right", "error"], [result]),
    ]
    nodes = [*graph.node[: place + 1], *after, *graph.node[place + 1 :]]
    del graph.node[:]
    graph.node.extend(nodes)
    return poisoned
