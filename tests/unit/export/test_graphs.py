"""Graphs answer as the networks and trees they are made from: converted, fused, and in every variant."""

import functools
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import xgboost
from onnx import helper

from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.errors import ExportFailed, GateFailed
from serin.export.convert.fuse import FeatureGraph, fuse, name_model
from serin.export.convert.network import Network
from serin.export.convert.onnx2trt import missing_tensorrt
from serin.export.convert.torch2onnx import torch2onnx
from serin.export.convert.trees2onnx import parse_trees, trees2onnx
from serin.export.variants.build import Unavailable, Variant, build_variants, large_nodes
from serin.export.variants.choose import judge_variants
from serin.formats.schema import Schema, Task, input_columns, outputs_of
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.models.trees import column_types, joined, margins
from serin.scoring.session import open_session
from serin.spec.model import ModelSpec
from tests.unit.export.small_court import rows_of, small_court, small_network

BOTH = TableShape(numeric=3, sizes=(5, 7), outputs=1)


@functools.cache
def exported(shape: TableShape) -> tuple[torch.nn.Module, onnx.ModelProto]:
    torch.manual_seed(1)
    module = build_model(ModelSpec(hidden=(8,), dropout=0.5), shape)
    return module, torch2onnx(module, shape)


@pytest.mark.parametrize(
    "shape",
    [
        BOTH,
        TableShape(numeric=2, sizes=(), outputs=3),
        TableShape(numeric=0, sizes=(4,), outputs=1),
    ],
    ids=["both", "numeric", "categorical"],
)
def test_a_network_answers_the_same_at_a_batch_size_that_was_not_tried(shape: TableShape) -> None:
    module, model = exported(shape)
    num = torch.randn(13, shape.numeric)
    cat = torch.stack([torch.randint(0, size, (13,)) for size in shape.sizes] or [torch.zeros(13)], dim=1)
    cat = cat[:, : len(shape.sizes)].long()
    (found,) = open_session(model).run(None, {"num": num.numpy(), "cat": cat.numpy()})
    np.testing.assert_allclose(found, module(num, cat).detach().numpy(), atol=1e-6)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 20


def test_nothing_of_this_machine_is_in_the_published_graph() -> None:
    content = exported(BOTH)[1].SerializeToString()
    assert b".py" not in content
    assert b"stack_trace" not in content
    assert not onnx.load_model_from_string(content).graph.node[0].metadata_props


class Forgetful(torch.nn.Module):
    """Answers something else each time."""

    def forward(self, num: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
        return num.sum(dim=1, keepdim=True) + torch.rand(()) * 100


class Unexportable(torch.nn.Module):
    def forward(self, num: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(num.T @ num).real[None, :1].expand(len(num), 1)


class Branching(torch.nn.Module):
    """Takes another path for other rows, which a recording of one run would not show."""

    def forward(self, num: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
        return num[:, :1] if num.sum() < 1e9 else -num[:, :1]


def test_a_graph_that_does_not_answer_as_its_module_is_refused() -> None:
    with pytest.raises(GateFailed, match="export gate, network"):
        torch2onnx(Forgetful(), TableShape(numeric=2, sizes=(3,), outputs=1))


@pytest.mark.parametrize("kind", [Unexportable, Branching])
def test_a_network_that_has_no_onnx_form_is_refused_with_one_line(kind: type[torch.nn.Module]) -> None:
    with pytest.raises(ExportFailed, match="export of the network failed") as refusal:
        torch2onnx(kind(), TableShape(numeric=2, sizes=(3,), outputs=1))
    assert "\n" not in str(refusal.value)


SIZES = (3, 25, 400)  # the last one is split by the order of its codes
ROWS = 4000
OBJECTIVES = {"binary": "binary:logistic", "multiclass": "multi:softprob", "regression": "reg:squarederror"}


def table(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    num = random.normal(size=(ROWS, 3)).astype(np.float32)
    num[random.random(num.shape) < 0.1] = np.nan
    cat = np.stack([random.integers(0, size, ROWS) for size in SIZES], axis=1)
    effect = np.random.default_rng(1).normal(size=SIZES[1])[cat[:, 1]]
    return num, cat, np.nan_to_num(num[:, 0]) + effect + (cat[:, 2] > 200) + 0.3 * random.normal(size=ROWS)


def grow(task: Task, *, rounds: int = 30, **settings: object) -> xgboost.Booster:
    num, cat, signal = table()
    target = {
        "binary": signal > 0.5,
        "multiclass": np.digitize(signal, [0, 1]),
        "regression": 4e4 + 900 * signal,
    }
    rows = xgboost.DMatrix(
        joined(num, cat), target[task].astype(np.float32), feature_types=column_types(3, SIZES),
        enable_categorical=True,
    )  # fmt: skip
    classes = {"num_class": 3} if task == "multiclass" else {}
    return xgboost.train({"objective": OBJECTIVES[task], "nthread": 1, **classes, **settings}, rows, rounds)


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_the_graph_answers_as_xgboost_does(task: Task) -> None:
    booster = grow(task)
    shape = TableShape(numeric=3, sizes=SIZES, outputs=3 if task == "multiclass" else 1)
    session = open_session(trees2onnx(parse_trees(booster), shape, task))
    num, cat, _ = table(seed=9)

    wanted = margins(booster, num, cat, SIZES)
    for rows in (1, 7, ROWS):
        (found,) = session.run(["logits"], {"num": num[:rows], "cat": cat[:rows]})
        apart = np.abs(found - wanted[:rows]).max() / max(1.0, float(np.abs(wanted).max()))
        print(f"{task}, {rows} rows: {apart:.2g} apart")
        assert found.dtype == np.float32
        assert apart < 1e-5
    trees = parse_trees(booster)["learner"]["gradient_booster"]["model"]["trees"]
    assert any(sum(tree["split_type"]) for tree in trees)  # by sets of categories ...
    assert any(0 in tree["default_left"] for tree in trees)  # ... and both ways for missing values
    assert any(1 in tree["default_left"] for tree in trees)


def test_trees_that_are_a_single_leaf_answer_with_it() -> None:
    booster = grow("regression", rounds=3, gamma=1e12)
    shape = TableShape(numeric=3, sizes=SIZES, outputs=1)
    session = open_session(trees2onnx(parse_trees(booster), shape, "regression"))
    num, cat, _ = table()
    (found,) = session.run(["logits"], {"num": num[:5], "cat": cat[:5]})

    assert found == pytest.approx(margins(booster, num[:5], cat[:5], SIZES), rel=1e-6)


def test_trees_of_another_table_are_refused() -> None:
    other = TableShape(numeric=4, sizes=(), outputs=1)
    with pytest.raises(ExportFailed, match="need 6 columns, but the table has 4"):
        trees2onnx(parse_trees(grow("binary", rounds=2)), other, "binary")
    with pytest.raises(ExportFailed, match="KeyError"):
        trees2onnx({"learner": {}}, other, "binary")


def twice(outputs: int) -> onnx.ModelProto:
    """A network whose logits are x, 2x, ... of its one numeric feature: easy to foresee. It does not look at `cat`."""
    graph = GraphBuilder()
    factors = graph.constant(np.arange(1, outputs + 1, dtype=np.float32), "factors")
    graph.nodes.append(helper.make_node("Mul", ["num", factors], ["logits"]))
    return graph.to_model(
        {"num": (onnx.TensorProto.FLOAT, ("batch", 1)), "cat": (onnx.TensorProto.INT64, ("batch", 1))},
        {"logits": (onnx.TensorProto.FLOAT, ("batch", outputs))},
    )


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    return twice(1)


def feature_graph(column: str) -> FeatureGraph:
    graph = GraphBuilder("inner/")
    cat = graph.op("Cast", column, to=onnx.TensorProto.INT64)
    num = graph.op("Identity", column)
    model = graph.to_model(
        {column: (ELEMENT_OF_DTYPE["FP32"], ("batch", 1))},
        {num: (onnx.TensorProto.FLOAT, ("batch", 1)), cat: (onnx.TensorProto.INT64, ("batch", 1))},
    )
    return FeatureGraph(model=model, num=num, cat=cat)


def schema_for(column: str, task: Task = "binary", classes: int = 0) -> Schema:
    entries = [{"name": column, "kind": "float", "dtype": "FP32"}]
    return Schema(task=task, inputs=input_columns(entries), outputs=outputs_of(task, classes))


@pytest.mark.parametrize(
    "column", ["x", "num", "cat", "logits", "network/num", "answer/sigmoid", "factors_1", "a b|ü", "batch"]
)
def test_a_column_may_be_called_as_anything_inside_the_graph(network: onnx.ModelProto, column: str) -> None:
    model = fuse(feature_graph(column), network, schema_for(column))
    (score,) = open_session(model).run(["score"], {column: np.array([[0.0], [2.0]], np.float32)})
    np.testing.assert_allclose(score, [[0.5], [1 / (1 + np.exp(-2))]], rtol=1e-6)


def test_a_column_called_as_the_answer_is_refused(network: onnx.ModelProto) -> None:
    with pytest.raises(ExportFailed, match="'score' has the name of the model's answer"):
        fuse(feature_graph("score"), network, schema_for("score"))


def test_regression_answers_the_value_itself(network: onnx.ModelProto) -> None:
    model = fuse(feature_graph("x"), network, schema_for("x", "regression"))
    (score,) = open_session(model).run(["score"], {"x": np.array([[-7.5]], np.float32)})
    assert score.tolist() == [[-7.5]]


def test_multiclass_answers_the_likeliest_class_and_all_probabilities() -> None:
    model = fuse(feature_graph("x"), twice(3), schema_for("x", "multiclass", 3))
    label, probabilities = open_session(model).run(
        ["label", "probabilities"], {"x": np.array([[1.0], [-1.0], [0.0]], np.float32)}
    )
    assert label.tolist() == [[2], [0], [0]]
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-6)
    assert [tensor.name for tensor in model.graph.output] == ["label", "probabilities"]


def test_features_of_another_width_than_the_network_are_refused(network: onnx.ModelProto) -> None:
    features = feature_graph("x")
    features.model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2
    with pytest.raises(ExportFailed, match="do not fit"):
        fuse(features, network, schema_for("x"))


def test_the_model_says_who_it_is(network: onnx.ModelProto) -> None:
    model = fuse(feature_graph("x"), network, schema_for("x"))
    name_model(model, {"name": "flights", "version": "3", "spec_digest": "ab"})
    meta = open_session(model).get_modelmeta()
    assert (meta.graph_name, meta.producer_name) == ("flights", "serin")
    assert meta.custom_metadata_map == {"name": "flights", "version": "3", "spec_digest": "ab"}


ALL = ("fp16", "int8", "fp32", "int8_dynamic", "int8_embeddings", "pruned", "tensorrt")


@pytest.fixture(scope="module")
def network_with_table() -> Network:
    return small_network()


def build(network: Network) -> dict[str, Variant | Unavailable]:
    return {one.name: one for one in build_variants(ALL, network, rows_of(512, 5), "cpu")}


def test_every_variant_answers_nearly_as_fp32_does_and_all_of_them_are_judged(
    network_with_table: Network,
) -> None:
    built = build(network_with_table)
    assert next(iter(built)) == "fp32"
    context = small_court(network_with_table)
    _, judged = judge_variants(context, list(built.values()))
    status = {one.name: one.status for one in judged}
    assert status["pruned"] == "unavailable"
    if missing_tensorrt():
        assert status["tensorrt"] == "unavailable"
    for name in ("fp16", "int8", "int8_dynamic", "int8_embeddings"):
        found = next(one for one in judged if one.name == name)
        assert found.largest_score_difference is not None, found.reason
        assert found.largest_score_difference < 0.05
        assert found.drop is not None
        assert abs(found.drop) < 0.01


@pytest.mark.parametrize("name", ["int8", "int8_dynamic"])
def test_two_products_of_integer_weights_fit_into_16_bits(name: str, network_with_table: Network) -> None:
    """Processors without VNNI clip what does not fit: their answers would be others."""
    variant = build(network_with_table)[name]
    assert isinstance(variant, Variant)
    tensors = [onnx.numpy_helper.to_array(tensor) for tensor in variant.graph.graph.initializer]
    weights = [values for values in tensors if values.dtype == np.int8 and values.ndim == 2]
    assert weights
    assert max(np.abs(values.astype(np.int64)).max() for values in weights) * 255 * 2 < 2**15


def test_fp16_halves_the_weights_and_keeps_sensitive_operators() -> None:
    torch.manual_seed(1)
    shape = TableShape(numeric=4, sizes=(50, 9), outputs=1)
    module = build_model(ModelSpec(kind="ft_transformer", blocks=1, heads=2, embedding=8), shape)
    plain = torch2onnx(module, shape)
    rows = {"num": rows_of(64, 1)["num"][:, [0, 1, 2, 0]], "cat": np.zeros((64, 2), np.int64)}
    network = Network(graph=plain, reference=lambda num, cat: num, made_by="torch")
    built = {one.name: one for one in build_variants(("fp32", "fp16"), network, rows, "cpu")}["fp16"]
    assert isinstance(built, Variant)
    weights = [onnx.numpy_helper.to_array(tensor) for tensor in built.graph.graph.initializer]
    halved = sum(values.size for values in weights if values.dtype == np.float16)
    assert halved > 0.8 * sum(values.size for values in weights if values.dtype in (np.float16, np.float32))
    inferred = onnx.shape_inference.infer_shapes(built.graph)
    kinds = {info.name: info.type.tensor_type.elem_type for info in inferred.graph.value_info}
    softmax = [node for node in built.graph.graph.node if node.op_type == "Softmax"]
    assert softmax
    assert all(kinds[node.output[0]] == onnx.TensorProto.FLOAT for node in softmax)
    wanted, found = (
        open_session(graph).run(["logits"], {"num": rows["num"], "cat": rows["cat"]})[0]
        for graph in (plain, built.graph)
    )
    np.testing.assert_allclose(found, wanted, atol=5e-3)


def test_nodes_with_values_that_fp16_cannot_hold_well_stay_in_fp32() -> None:
    assert large_nodes(small_network().graph, rows_of(64, 1)) == []
    assert large_nodes(small_network(40_000.0).graph, rows_of(64, 1)) == ["logits"]


def test_a_regression_in_large_units_passes_in_fp16() -> None:
    network = small_network(40_000.0)
    built = list(build_variants(("fp32", "fp16"), network, rows_of(512, 5), "cpu"))
    _, judged = judge_variants(small_court(network, "regression"), built)
    assert judged[1].largest_score_difference is not None, judged[1].reason
    assert judged[1].largest_score_difference < 0.01


def test_int8_embeddings_take_a_quarter_of_the_memory() -> None:
    torch.manual_seed(1)
    shape = TableShape(numeric=2, sizes=(4000, 3000), outputs=1)
    plain = torch2onnx(build_model(ModelSpec(hidden=(8,), embedding=16), shape), shape)
    network = Network(graph=plain, reference=lambda num, cat: num, made_by="torch")
    rows = {"num": np.zeros((4, 2), np.float32), "cat": np.array([[0, 0], [3999, 2999], [7, 2], [9, 1]])}
    small = {one.name: one for one in build_variants(("fp32", "int8_embeddings"), network, rows, "cpu")}
    built = small["int8_embeddings"]
    assert isinstance(built, Variant)
    assert built.graph.ByteSize() < 0.35 * plain.ByteSize()
    wanted, found = (open_session(graph).run(["logits"], rows)[0] for graph in (plain, built.graph))
    np.testing.assert_allclose(found, wanted, atol=0.02)


def test_a_model_without_layers_has_no_variants_and_reports_it() -> None:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["num"], ["logits"], name="same")],
        "same",
        [
            onnx.helper.make_tensor_value_info("num", onnx.TensorProto.FLOAT, ["batch", 1]),
            onnx.helper.make_tensor_value_info("cat", onnx.TensorProto.INT64, ["batch", 0]),
        ],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 1])],
    )
    model = onnx.helper.make_model(graph)
    network = Network(graph=model, reference=lambda num, cat: num, made_by="hand")
    built = list(build_variants(ALL, network, {}, "cpu"))
    assert [one.name for one in built if isinstance(one, Variant)] == ["fp32"]
    reasons = {one.name: one.reason for one in built if isinstance(one, Unavailable)}
    assert "no layers with weights" in reasons["int8"]
    assert "no embedding table" in reasons["int8_embeddings"]


def test_variants_leave_no_trace_of_this_machine(network_with_table: Network, tmp_path: Path) -> None:
    for one in build(network_with_table).values():
        if isinstance(one, Variant):
            text = one.graph.SerializeToString()
            assert b"/tmp" not in text
            assert b"onnx.quantize" not in text
            assert json.dumps(one.name)
