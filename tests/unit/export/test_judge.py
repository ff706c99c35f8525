from dataclasses import replace

import numpy as np
import onnx
import pytest

from serin.export.convert.network import Network
from serin.export.variants.build import Unavailable, Variant
from serin.export.variants.choose import _choose, judge_variants
from serin.export.variants.int8 import to_int8
from serin.formats.gate import VariantResult
from tests.unit.export.small_court import (
    copy_of,
    rows_of,
    small_court,
    small_network,
    wrong_from,
    wrong_scale,
)


@pytest.fixture(scope="module")
def network() -> Network:
    return small_network()


def judge(network: Network, *others: Variant | Unavailable, **asked: object) -> dict[str, VariantResult]:
    context = small_court(network, **asked)
    _, judged = judge_variants(context, [Variant(name="fp32", graph=network.graph), *others])
    return {one.name: one for one in judged}


def test_a_layer_with_a_wrong_scale_is_refused_with_reason_and_node(network: Network) -> None:
    poisoned = Variant(name="int8", graph=wrong_scale(network.graph, "first", 1.3))
    found = judge(network, poisoned)["int8"]
    assert found.status == "rejected"
    assert found.node == "first"
    assert "'score' differs from fp32" in found.reason
    assert "at batch size 1, first in row 5" in found.reason
    assert "node 'first' (Gemm) differs by" in found.reason


def test_a_quantised_layer_with_the_wrong_scale_is_distinguished_from_a_right_one(network: Network) -> None:
    honest = to_int8(network.graph, rows_of(512, 5))
    assert isinstance(honest, onnx.ModelProto)
    poisoned = copy_of(honest)
    layer = next(node for node in network.graph.graph.node if node.name == "plain").input[1]
    scale = next(tensor for tensor in poisoned.graph.initializer if tensor.name == f"{layer}_scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 2, scale.name))
    found = judge(network, Variant(name="int8", graph=honest), Variant(name="int8 again", graph=poisoned))
    assert found["int8"].status != "rejected", found["int8"].reason
    assert (found["int8 again"].status, found["int8 again"].node) == ("rejected", "plain")


@pytest.mark.parametrize("node", ["first", "plain"])
def test_a_kernel_that_is_wrong_only_from_eight_rows_on_is_refused_with_the_size_and_the_node(
    network: Network, node: str
) -> None:
    found = judge(network, Variant(name="tensorrt", graph=wrong_from(8, network.graph, node)))["tensorrt"]
    assert (found.status, found.node) == ("rejected", node)
    assert "at batch size 8, first in row 500" in found.reason


def test_a_kernel_that_is_wrong_only_in_the_largest_batch_is_refused(network: Network) -> None:
    poisoned = Variant(name="fp16", graph=wrong_from(256, network.graph, "first"))
    assert "batch size" not in judge(network, poisoned, max_rows=255)["fp16"].reason
    found = judge(network, poisoned, max_rows=256)["fp16"]
    assert "at batch size 256" in found.reason


def test_a_score_that_moves_with_its_company_is_refused_unless_that_is_its_nature(network: Network) -> None:
    moving = wrong_from(8, network.graph, "plain")
    last = moving.graph.node[-1]
    weak = onnx.helper.make_tensor("weak", onnx.TensorProto.FLOAT, [], [0.02])
    moving.graph.initializer.append(weak)
    error = next(node for node in moving.graph.node if node.op_type == "Cast")
    error.output[0] = "one"
    place = list(moving.graph.node).index(error)
    rest = [*moving.graph.node[: place + 1], onnx.helper.make_node("Mul", ["one", "weak"], ["error"])]
    rest += moving.graph.node[place + 1 :]
    del moving.graph.node[:]
    moving.graph.node.extend(rest)
    assert last.op_type == "Mul"
    steady = judge(network, Variant(name="int8", graph=moving))["int8"]
    assert "differs from itself at batch size 1" in steady.reason
    dynamic = judge(network, Variant(name="int8_dynamic", graph=moving, steady=False))["int8_dynamic"]
    assert dynamic.status != "rejected"


def test_a_metric_beyond_the_budget_is_refused_although_every_score_is_near(network: Network) -> None:
    poisoned = Variant(name="pruned", graph=wrong_scale(network.graph, "first", 1.3))
    found = judge(network, poisoned, variant_tolerance=10.0, budget={"max_drop": 0.0})["pruned"]
    assert found.status == "rejected"
    assert "auc on 1,000 test rows drops by" in found.reason


def test_a_segment_that_suffers_alone_is_named(network: Network) -> None:
    context = small_court(network, variant_tolerance=10.0, budget={"max_drop": 1.0, "segment_max_drop": 0.01})
    inside = context.rows.cat[:, 0] < 40
    rows = replace(context.rows, segments={"carrier=AA": inside, "carrier=BB": ~inside})
    hurt = copy_of(network.graph)
    table = next(each for each in hurt.graph.initializer if each.dims[0] == 100)
    values = onnx.numpy_helper.to_array(table).copy()
    values[:40] = np.random.default_rng(1).normal(0, 3, (40, 4))
    table.CopyFrom(onnx.numpy_helper.from_array(values, table.name))
    _, judged = judge_variants(
        replace(context, rows=rows),
        [Variant(name="fp32", graph=network.graph), Variant(name="int8_embeddings", graph=hurt)],
    )
    assert judged[1].status == "rejected"
    assert "auc of carrier=AA drops by" in judged[1].reason
    assert list(judged[1].segments) == ["carrier=AA", "carrier=BB"]
    assert judged[1].segments["carrier=BB"] == 0


def test_answers_that_are_not_finite_are_refused(network: Network) -> None:
    found = judge(network, Variant(name="fp16", graph=wrong_scale(network.graph, "first", np.nan)))["fp16"]
    assert "not finite" in found.reason


def test_what_cannot_be_built_or_loaded_here_is_reported_and_harms_nobody(network: Network) -> None:
    broken = copy_of(network.graph)
    broken.graph.node[3].op_type = "NoSuchOperator"
    found = judge(
        network, Unavailable(name="tensorrt", reason="no TensorRT"), Variant(name="fp16", graph=broken)
    )
    assert {name: one.status for name, one in found.items()} == {
        "fp32": "chosen",
        "tensorrt": "unavailable",
        "fp16": "unavailable",
    }
    assert found["tensorrt"].reason == "no TensorRT"


def test_every_variant_is_weighed_counted_and_timed(network: Network) -> None:
    found = judge(network)["fp32"]
    assert found.bytes == network.graph.ByteSize()
    assert found.flops == 2 * 7 * 16 + 16 + 2 * 16 + 1
    assert set(found.latency_us) == {1, 64}
    assert found.mix_us == pytest.approx(sum(found.latency_us.values()) / 2, abs=0.1)
    assert (found.drop, found.largest_score_difference) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ({"fp16": ("passed", 60.0)}, "fp16"),
        ({"fp16": ("passed", 97.0)}, "fp32"),  # within the noise
        ({"fp16": ("rejected", 10.0), "int8": ("passed", 50.0)}, "int8"),
        ({"fp16": ("passed", 40.0), "int8": ("passed", 50.0)}, "fp16"),
        ({"fp16": ("unavailable", None)}, "fp32"),
    ],
)
def test_the_fastest_that_passed_is_chosen(others: dict[str, tuple], chosen: str) -> None:
    judged = {"fp32": VariantResult(name="fp32", status="passed", mix_us=100.0)}
    judged |= {
        name: VariantResult(name=name, status=status, mix_us=taken)
        for name, (status, taken) in others.items()
    }
    assert _choose(judged, "fp32") == chosen
