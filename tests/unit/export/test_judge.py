"""What a version is judged by: its metrics, and those of its groups."""

from dataclasses import replace

import numpy as np
import onnx
import pyarrow as pa
import pytest

from serin.errors import GateFailed, SpecError
from serin.export.convert.network import Network
from serin.export.gate.gate import check_groups
from serin.export.variants.build import Unavailable, Variant, to_int8
from serin.export.variants.choose import _choose, judge_variants
from serin.formats.gate import GroupReport, VariantResult
from serin.formats.schema import Schema, Task, outputs_of
from serin.metrics import estimate, estimate_share
from serin.spec.export import ExportSpec
from serin.spec.load import load_spec
from tests.fakes.small_pipeline import small_spec
from tests.unit.export.small_court import (
    copy_of,
    rows_of,
    small_court,
    small_network,
    wrong_from,
    wrong_scale,
)
from tests.unit.export.small_dataset import spec_for


@pytest.fixture(scope="module")
def network() -> Network:
    return small_network()


def judge(network: Network, *others: Variant | Unavailable, **asked: object) -> dict[str, VariantResult]:
    context = small_court(network, **asked)
    _, judged = judge_variants(context, [Variant(name="fp32", graph=network.graph), *others])
    return {one.name: one for one in judged}


def test_a_layer_with_a_wrong_scale_is_refused_with_the_reason(network: Network) -> None:
    poisoned = Variant(name="int8", graph=wrong_scale(network.graph, "first", 1.3))
    found = judge(network, poisoned)["int8"]
    assert found.status == "rejected"
    assert "'score' differs from fp32" in found.reason
    assert "at batch size 1, first in row 5" in found.reason


def test_a_quantised_layer_with_the_wrong_scale_is_distinguished_from_a_right_one(network: Network) -> None:
    honest = to_int8(network.graph, rows_of(512, 5))
    assert isinstance(honest, onnx.ModelProto)
    poisoned = copy_of(honest)
    layer = next(node for node in network.graph.graph.node if node.name == "plain").input[1]
    scale = next(tensor for tensor in poisoned.graph.initializer if tensor.name == f"{layer}_scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 2, scale.name))
    found = judge(network, Variant(name="int8", graph=honest), Variant(name="int8 again", graph=poisoned))
    assert found["int8"].status != "rejected", found["int8"].reason
    assert found["int8 again"].status == "rejected"


@pytest.mark.parametrize("node", ["first", "plain"])
def test_a_kernel_that_is_wrong_only_from_eight_rows_on_is_refused_with_the_size(
    network: Network, node: str
) -> None:
    found = judge(network, Variant(name="tensorrt", graph=wrong_from(8, network.graph, node)))["tensorrt"]
    assert found.status == "rejected"
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
    status = {name: one.status for name, one in found.items()}
    assert status == {"fp32": "chosen", "tensorrt": "unavailable", "fp16": "unavailable"}
    assert found["tensorrt"].reason == "no TensorRT"


def test_every_variant_is_weighed_and_timed(network: Network) -> None:
    found = judge(network)["fp32"]
    assert found.bytes == network.graph.ByteSize()
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


ROWS = 6000
People = tuple[pa.Table, np.ndarray, np.ndarray]  # with their targets and scores


def people(worse_for: str = "nobody", seed: int = 5) -> People:
    """Rows of three groups, one of them small; the scores say nothing about those in `worse_for`."""
    random = np.random.default_rng(seed)
    sex = random.choice(["f", "m", "x", ""], ROWS, p=[0.4, 0.577, 0.02, 0.003])
    target = (random.random(ROWS) < 0.4).astype(np.float32)
    signal = np.where(sex == worse_for, 0.0, 2.0) * (target - 0.5) + random.normal(size=ROWS)
    return pa.table({"sex": sex.tolist()}), target, (1 / (1 + np.exp(-signal))).astype(np.float32)


def judged(groups: dict[str, object], rows: People | None = None, task: Task = "binary") -> GroupReport:
    table, target, scores = rows or people()
    export = ExportSpec.model_validate({"segments": ["sex"], "groups": groups})
    schema = Schema(task=task, inputs=(), outputs=outputs_of(task))
    return check_groups(export, schema, table, target, {"score": scores[:, None]})


def test_groups_are_reported_with_bands_and_small_ones_are_named() -> None:
    report = judged({"min_rows": 100})
    found = {one.group: one for one in report.groups}
    assert list(found) == ["sex=m", "sex=f", "sex=x"]
    assert found["sex=x"].rows == people()[0]["sex"].to_pylist().count("x")
    assert report.small == {"sex is null": sum(value == "" for value in people()[0]["sex"].to_pylist())}
    for one in found.values():
        assert one.metric.low < one.metric.value < one.metric.high
        assert one.rate is not None
        assert one.gap.low < 0 < one.gap.high
    assert found["sex=x"].metric.high - found["sex=x"].metric.low > 0.05
    assert found["sex=f"].metric.high - found["sex=f"].metric.low < 0.05


def test_a_version_that_is_surely_worse_for_one_group_is_refused() -> None:
    with pytest.raises(
        GateFailed, match=r"groups: 1 of 2 groups beyond a limit, .* sex=f: auc 0\.[45]\d+, other rows 0\.9"
    ) as refused:
        judged({"max_gap": 0.1}, people("f"))
    assert "(allowed 0.1)" in str(refused.value)
    assert judged({"max_gap": 0.5}, people("f")).groups


def test_a_gap_that_may_be_chance_refuses_nothing() -> None:
    """The small group is worse by more than the limit, but so few rows prove nothing."""
    table, target, scores = people()
    sex = np.asarray(table["sex"].to_pylist())
    few = np.flatnonzero(sex == "x")[:30]
    keep = np.concatenate([np.flatnonzero(sex != "x"), few])
    report = judged({"max_gap": 0.0, "min_rows": 20}, (table.take(keep), target[keep], scores[keep]))
    gaps = {one.group: one.gap for one in report.groups}
    assert max(gap.value for gap in gaps.values() if gap) > 0


def test_a_selection_rate_that_is_surely_apart_is_refused() -> None:
    table, target, scores = people()
    sex = np.asarray(table["sex"].to_pylist())
    scores = np.where(sex == "f", scores * 0.5, scores).astype(np.float32)
    with pytest.raises(GateFailed, match=r"sex=f: selection rate 0\.\d+, other rows 0\.\d+: 0\.\d+ apart"):
        judged({"max_rate_gap": 0.1, "threshold": 0.4}, (table, target, scores))


def test_a_regression_s_gap_is_a_share_and_has_no_selection_rate() -> None:
    report = judged({"metric": "rmse"}, task="regression")
    (first, _) = report.groups
    assert first.rate is None
    assert report.threshold is None
    assert abs(first.gap.value) < 0.2


def test_bands_cover_the_truth_as_often_as_they_say() -> None:
    """The metric of many samples against its value on all rows: 95% bands miss it in about 5%."""
    random = np.random.default_rng(0)
    target = (random.random(200_000) < 0.3).astype(np.float32)
    scores = 1 / (1 + np.exp(-(target + random.normal(size=len(target)))))
    for metric, truth in (("auc", scores), ("logloss", scores), ("accuracy", scores), ("rmse", scores)):
        exact, _ = estimate(metric, target, truth)  # type: ignore[arg-type]
        missed = 0
        for _ in range(300):
            rows = random.integers(0, len(target), 400)
            value, error = estimate(metric, target[rows], truth[rows])  # type: ignore[arg-type]
            missed += abs(value - exact) > 1.96 * error
        assert 4 <= missed <= 27, metric
    assert estimate_share(np.zeros(50))[1] > 0.02


def test_limits_need_columns_to_group_by_and_rates_a_binary_task(tmp_path: object) -> None:
    with pytest.raises(SpecError, match=r"export\.groups: has limits, but export\.segments names no columns"):
        spec_for("binary", export={"groups": {"max_gap": 0.1}})
    with pytest.raises(SpecError, match=r"export\.groups\.max_rate_gap: is for binary targets"):
        spec_for("regression", export={"segments": ["carrier"], "groups": {"max_rate_gap": 0.1}})
    assert load_spec(small_spec(tmp_path, rows=10)).export.groups.max_gap is None  # type: ignore[arg-type]
