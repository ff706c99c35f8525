import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from serin.export.convert.network import Network
from serin.export.convert.onnx2trt import missing_tensorrt
from serin.export.convert.torch2onnx import torch2onnx
from serin.export.session import open_session
from serin.export.variants.build import Unavailable, Variant, build_variants
from serin.export.variants.choose import judge_variants
from serin.export.variants.flops import count_flops
from serin.export.variants.fp16 import large_nodes
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec
from tests.unit.export.small_court import rows_of, small_court, small_network

ALL = ("fp16", "int8", "fp32", "int8_dynamic", "int8_embeddings", "pruned", "tensorrt")


@pytest.fixture(scope="module")
def network() -> Network:
    return small_network()


def build(network: Network) -> dict[str, Variant | Unavailable]:
    return {one.name: one for one in build_variants(ALL, network, rows_of(512, 5), "cpu")}


def test_every_variant_answers_nearly_as_fp32_does_and_all_of_them_are_judged(network: Network) -> None:
    built = build(network)
    assert next(iter(built)) == "fp32"
    context = small_court(network)
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


def test_operations_are_counted_for_one_row() -> None:
    assert count_flops(small_network().graph) == 2 * 7 * 16 + 16 + 2 * 16 + 1


def test_variants_leave_no_trace_of_this_machine(network: Network, tmp_path: Path) -> None:
    for one in build(network).values():
        if isinstance(one, Variant):
            text = one.graph.SerializeToString()
            assert b"/tmp" not in text
            assert b"onnx.quantize" not in text
            assert json.dumps(one.name)
