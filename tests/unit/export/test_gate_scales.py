"""The gate on targets of every size: correct graphs pass, a changed leaf and a swapped column do not."""

import functools
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
import xgboost
from onnx import numpy_helper

from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.errors import GateFailed
from serin.export.convert.blend_graphs import blend_graphs
from serin.export.convert.features2onnx import FeatureGraph
from serin.export.convert.fuse import fuse
from serin.export.convert.network import Network, graph_network, torch_reference
from serin.export.convert.torch2onnx import torch2onnx
from serin.export.convert.trees2onnx import parse_trees, summed, trees2onnx
from serin.export.gate.gate import check_metric, check_scores
from serin.export.gate.golden import GoldenRows
from serin.export.session import open_session
from serin.formats.gate import ScoreScale, scores_apart
from serin.formats.schema import Schema, input_columns, outputs_of
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.models.trees import column_types, feature_table, in_units, joined, margins
from serin.spec.model import ModelSpec

SIZES = (6,)
SHAPE = TableShape(numeric=3, sizes=SIZES, outputs=1, units=True)
SCHEMA = Schema(
    task="regression",
    inputs=input_columns(
        [{"name": "x", "kind": "float", "dtype": "FP32"}, {"name": "c", "kind": "int", "dtype": "INT64"}]
    ),
    outputs=outputs_of("regression"),
)
UNITS = [2.0**power for power in (-30, -20, -10, 0, 10, 20, 30, 40)]  # from 1e-9 to 1e12
FAR = 1000  # standard deviations between the target's mean and 0
TOLERANCE = 1e-4
GOLDEN = 128


@functools.cache
def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    num, cat = random.normal(size=(count, 3)).astype(np.float32), random.integers(0, SIZES[0], (count, 1))
    return num, cat, num[:, 0] * num[:, 1] + np.sin(3 * num[:, 2]) + cat[:, 0] / 2


@functools.cache
def grown(mean: float, rounds: int) -> xgboost.Booster:
    num, cat, signal = rows(600, 1)
    target = (mean + (signal - signal.mean()) / signal.std()).astype(np.float32)
    table = xgboost.DMatrix(
        joined(num, cat), target, feature_types=column_types(3, SIZES), enable_categorical=True
    )
    return xgboost.train({"nthread": 1, "max_depth": 4, "eta": 0.1}, table, rounds)


def trees(unit: float, mean: float, rounds: int = 150) -> Network:
    booster = in_units(grown(mean / unit, rounds), unit)
    document = parse_trees(booster)
    terms, base = summed(document)
    return Network(
        graph=trees2onnx(document, SHAPE, "regression"),
        reference=lambda num, cat: margins(booster, num, cat, SIZES),
        made_by="XGBoost",
        terms=terms,
        base=base,
    )


KNOWN = {"scale": 3.0, "shift": 5.0}  # to find them in the graph


def set_units(module: torch.nn.Module, units: dict[str, float]) -> None:
    for name, value in units.items():
        module.get_buffer(name).fill_(value)


@functools.cache
def exported(kind: str) -> tuple[torch.nn.Module, onnx.ModelProto]:
    torch.manual_seed(4)
    module = build_model(ModelSpec.model_validate({"kind": kind, "hidden": [8]}), SHAPE)
    set_units(module, KNOWN)
    return module, torch2onnx(module, SHAPE)


def network(kind: str, unit: float, mean: float) -> Network:
    """A network whose target has this unit: its last two numbers, in the module and in its graph."""
    module, graph = exported(kind)
    units = {"scale": unit, "shift": mean}
    copy = onnx.ModelProto()
    copy.CopyFrom(graph)
    for name, known in KNOWN.items():
        (tensor,) = (one for one in copy.graph.initializer if np.all(numpy_helper.to_array(one) == known))
        like = np.full_like(numpy_helper.to_array(tensor), units[name])
        tensor.CopyFrom(numpy_helper.from_array(like, tensor.name))
    plain = torch_reference(module)

    def reference(num: np.ndarray, cat: np.ndarray) -> np.ndarray:
        set_units(module, units)
        return plain(num, cat)

    return Network(graph=copy, reference=reference, made_by="torch", base=mean, size=unit)


def blend(unit: float, mean: float) -> Network:
    members = [(trees(unit, mean, 40), 0.7), (network("mlp", unit, mean), 0.3)]
    return Network(
        graph=blend_graphs([(one.graph, weight) for one, weight in members]),
        reference=lambda num, cat: sum(w * one.reference(num, cat).astype(float) for one, w in members),
        made_by="both",
        terms=sum(one.terms for one, _ in members),
        base=sum(w * one.base for one, w in members),
        size=sum(w * one.size for one, w in members),
    )


MODELS = {
    "xgboost": trees,
    **{kind: functools.partial(network, kind) for kind in ("mlp", "dcn")},
    "blend": blend,
    "onnx": lambda unit, mean: graph_network(network("mlp", unit, mean).graph, "model.onnx"),
}


def check(given: Network, graph: onnx.ModelProto | None = None) -> tuple[ScoreScale, float]:
    """The gate for a network, or for another graph in its place."""
    num, cat, _ = rows(GOLDEN, 2)
    inner = GraphBuilder("inner/")
    tensors = [inner.op("Identity", name) for name in ("x", "c")]
    fed = {"x": (ELEMENT_OF_DTYPE["FP32"], ("batch", 3)), "c": (ELEMENT_OF_DTYPE["INT64"], ("batch", 1))}
    made = dict(zip(tensors, fed.values(), strict=True))
    golden = GoldenRows(
        table=None, inputs={"x": num, "c": cat}, numeric=("a", "b", "c"), categorical=("d",), num=num,
        cat=cat.astype(np.int32), row=np.arange(GOLDEN),
    )  # fmt: skip
    model = fuse(
        FeatureGraph(model=inner.to_model(fed, made), num=tensors[0], cat=tensors[1]),
        graph or given.graph,
        SCHEMA,
    )
    scales, largest = check_scores(model, given, SCHEMA, golden, TOLERANCE)
    return scales["score"], largest


def changed_leaves(graph: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """The graph with one leaf of another sign, for the largest leaf and for the median one."""
    for place in (-1, 0):
        copy = onnx.ModelProto()
        copy.CopyFrom(graph)
        node = next((one for one in copy.graph.node if one.op_type == "TreeEnsemble"), None)
        if node is None:
            return
        weights = next(one for one in node.attribute if one.name == "leaf_weights")
        leaves = numpy_helper.to_array(weights.t).copy()
        order = np.argsort(np.abs(leaves))
        leaves[order[place or len(order) // 2]] *= -1
        weights.t.CopyFrom(numpy_helper.from_array(leaves))
        yield copy


def swapped_column(graph: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with the first two columns of `num` in the other order."""
    copy = onnx.ModelProto()
    copy.CopyFrom(graph)
    for node in copy.graph.node:
        for at, name in enumerate(node.input):
            if name == "num":
                node.input[at] = "swapped"
    order = numpy_helper.from_array(np.array([1, 0, 2]), "order")
    copy.graph.initializer.append(order)
    copy.graph.node.insert(0, onnx.helper.make_node("Gather", ["num", "order"], ["swapped"], axis=1))
    return copy


@pytest.mark.parametrize("kind", MODELS)
def test_a_correct_graph_passes_and_a_wrong_one_fails_for_every_size_of_the_target(kind: str) -> None:
    for unit in UNITS:
        for mean in (0.0, 3 * unit, -FAR * unit):
            given = MODELS[kind](unit, mean)
            scale, largest = check(given)
            print(f"{kind}, {mean:.3g} +- {unit:.3g}: {largest:.2g} of {scale.unit[0]:.3g}")
            wrong = [swapped_column(given.graph), *changed_leaves(given.graph)]
            for graph in wrong if kind != "onnx" else ():  # which has no other reference than itself
                with pytest.raises(GateFailed, match=r"export\.tolerance allows"):
                    check(given, graph)


def test_scores_near_zero_of_a_target_in_millions_may_be_rounded_differently() -> None:
    given, (num, cat, _) = trees(2.0**20, 0.0, 300), rows(600, 3)
    own = grown(0.0, 300).predict(feature_table(num, cat, SIZES), output_margin=True)[:, None] * 2.0**20
    (found,) = open_session(given.graph).run(["logits"], {"num": num, "cat": cat})
    assert scores_apart(found, own, None).max() > TOLERANCE  # of each row's own score
    assert scores_apart(found, own, given.scale(own)).max() < TOLERANCE


def test_the_message_names_the_setting_and_the_difference_in_standard_deviations() -> None:
    given = network("mlp", 2.0**20, 0.0)
    with pytest.raises(GateFailed) as refusal:
        check(given, swapped_column(given.graph))
    assert re.search(
        r"torch -?\d+\.\d+, graph -?\d+\.\d+; the difference is [\d.]+ standard deviations of the scores "
        r"\(\d+(\.\d+)?\), export\.tolerance allows 0\.0001",
        str(refusal.value),
    )
    assert "np." not in str(refusal.value)


@pytest.mark.parametrize("value", [0.0, 5.0, -1e12, 1e-9])
def test_constant_scores_may_differ_by_rounding_and_no_more(value: float) -> None:
    scores = np.full((20, 1), value, np.float32)
    scale = ScoreScale.of(scores)
    assert scores_apart(np.nextafter(scores, np.float32(2 * value)), scores, scale).max() == 0
    wrong = scores + np.float32(1e-5 * (abs(value) or 1000.0))
    assert scores_apart(wrong, scores, scale).min() > TOLERANCE


@pytest.mark.parametrize("unit", UNITS)
def test_a_metric_is_compared_on_the_targets_own_scale(unit: float) -> None:
    given = network("mlp", unit, 0.0)
    num, cat, _ = rows(GOLDEN, 2)
    wanted = given.reference(num, cat)
    batches = [(num, cat, wanted[:, 0] + unit)]
    scale = given.scale(wanted)
    check_metric(given, batches, "regression", TOLERANCE, {"test_rmse": unit}, scale)
    with pytest.raises(GateFailed, match="export gate, checkpoint: rmse"):
        check_metric(given, batches, "regression", TOLERANCE, {"test_rmse": 1.1 * unit}, scale)
    with pytest.raises(GateFailed, match="export gate, metric: rmse"):
        swapped = replace(given, graph=swapped_column(given.graph))
        check_metric(swapped, batches, "regression", TOLERANCE, {}, scale)
