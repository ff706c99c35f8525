"""The gate: correct graphs pass on targets of every size, a changed leaf and a swapped column do not."""

import functools
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
import torch
import xgboost
from onnx import helper, numpy_helper

from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.errors import GateFailed
from serin.export.convert.fuse import FeatureGraph, fuse
from serin.export.convert.network import Network, blend_graphs, graph_network
from serin.export.convert.torch2onnx import torch2onnx
from serin.export.convert.trees2onnx import parse_trees, summed, trees2onnx
from serin.export.gate.gate import GoldenRows, batch_sizes, check_features, check_metric, check_scores
from serin.formats.gate import ScoreScale, scores_apart
from serin.formats.schema import Schema, Task, input_columns, outputs_of
from serin.models.build import build_model, network_margins
from serin.models.shape import TableShape
from serin.models.trees import column_types, feature_table, in_units, joined, margins
from serin.scoring.session import open_session
from serin.spec.model import ModelSpec

ROWS = 20


class Weighing(torch.nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.weigh = torch.nn.Linear(2, outputs)

    def forward(self, num: torch.Tensor, cat: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.weigh(torch.cat([num, cat.float()], dim=1))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    network: Network
    model: onnx.ModelProto
    features: FeatureGraph
    schema: Schema
    golden: GoldenRows


def network_of(module: Weighing) -> Network:
    """The module as ONNX, by hand: what the exporter makes is tested elsewhere."""
    graph = GraphBuilder("n/")
    weight = graph.constant(module.weigh.weight.detach().numpy())
    bias = graph.constant(module.weigh.bias.detach().numpy())
    both = graph.op("Concat", "num", graph.op("Cast", "cat", to=onnx.TensorProto.FLOAT), axis=1)
    graph.nodes.append(helper.make_node("Gemm", [both, weight, bias], ["logits"], transB=1))
    model = graph.to_model(
        {"num": (onnx.TensorProto.FLOAT, ("batch", 1)), "cat": (onnx.TensorProto.INT64, ("batch", 1))},
        {"logits": (onnx.TensorProto.FLOAT, ("batch", len(module.weigh.bias)))},
    )
    return Network(graph=model, reference=network_margins(module), made_by="torch")


def with_reference(network: Network, module: Weighing) -> Network:
    return replace(network, reference=network_margins(module))


INPUTS = input_columns(
    [{"name": "x", "kind": "float", "dtype": "FP32"}, {"name": "c", "kind": "int", "dtype": "INT64"}]
)


def identity_features(numbers: int) -> FeatureGraph:
    """num is x, of so many numbers, and cat is c."""
    graph = GraphBuilder("inner/")
    tensors = [graph.op("Identity", name) for name in ("x", "c")]
    fed = {
        "x": (ELEMENT_OF_DTYPE["FP32"], ("batch", numbers)),
        "c": (ELEMENT_OF_DTYPE["INT64"], ("batch", 1)),
    }
    model = graph.to_model(fed, dict(zip(tensors, fed.values(), strict=True)))
    return FeatureGraph(model=model, num=tensors[0], cat=tensors[1])


def make_case(task: Task = "binary", outputs: int = 1) -> Case:
    torch.manual_seed(2)
    module = Weighing(outputs)
    network = network_of(module)
    features = identity_features(1)
    schema = Schema(task=task, inputs=INPUTS, outputs=outputs_of(task, outputs))
    random = np.random.default_rng(4)
    x = random.standard_normal((ROWS, 1), dtype=np.float32)
    x[3] = np.nan if task == "regression" else 0.0
    c = random.integers(0, 4, (ROWS, 1))
    golden = GoldenRows(
        table=None,
        inputs={"x": x, "c": c},
        numeric=("speed",),
        categorical=("wing",),
        num=x.copy(),
        cat=c.astype(np.int32),
        row=np.arange(100, 100 + ROWS),
    )
    model = fuse(features, network.graph, schema)
    return Case(network=network, model=model, features=features, schema=schema, golden=golden)


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case()


def test_one_ulp_in_one_row_of_one_column_is_found_and_named(case: Case) -> None:
    num = case.golden.num.copy()
    num[11, 0] = np.nextafter(num[11, 0], np.float32(np.inf))
    with pytest.raises(
        GateFailed, match="export gate, features: column 'speed' differs in 1 of 20"
    ) as refusal:
        check_features(case.model, (case.features.num, case.features.cat), replace(case.golden, num=num))
    assert refusal.value.fields["column"] == "speed"
    assert refusal.value.fields["row"] == 111


def test_the_sign_of_zero_is_a_difference_and_the_payload_of_nan_is_not(case: Case) -> None:
    same = case.golden
    other_nan = np.array([0xFFC00001], np.uint32).view(np.float32)[0]
    inputs = {**same.inputs, "x": same.inputs["x"].copy()}
    inputs["x"][5], num = np.nan, same.num.copy()
    num[5] = other_nan
    check_features(case.model, (case.features.num, case.features.cat), replace(same, inputs=inputs, num=num))
    num = same.num.copy()
    num[3] = -0.0
    with pytest.raises(GateFailed, match="first in row 103"):
        check_features(case.model, (case.features.num, case.features.cat), replace(same, num=num))


def test_another_code_is_found_and_named(case: Case) -> None:
    cat = case.golden.cat.copy()
    cat[0, 0] += 1
    with pytest.raises(
        GateFailed, match="column 'wing' differs in 1 of 20 golden rows at batch size 1, first in row 100"
    ):
        check_features(case.model, (case.features.num, case.features.cat), replace(case.golden, cat=cat))


def test_features_of_another_form_are_refused(case: Case) -> None:
    wider = replace(case.golden, num=np.zeros((ROWS, 2), np.float32))
    with pytest.raises(GateFailed, match="another shape"):
        check_features(case.model, (case.features.num, case.features.cat), wider)


@pytest.mark.parametrize(("task", "outputs"), [("binary", 1), ("regression", 1), ("multiclass", 3)])
def test_an_honest_graph_passes(case: Case, task: Task, outputs: int) -> None:
    case = case if task == "binary" else make_case(task, outputs)
    golden = case.golden
    if task == "regression":  # a score that is not a number can prove nothing
        with pytest.raises(GateFailed, match="first in row 103: torch itself answers nan"):
            check_scores(case.model, case.network, case.schema, golden, 1e-4)
        golden.inputs["x"][3] = golden.num[3] = 1.0
    scales, largest = check_scores(case.model, case.network, case.schema, golden, 1e-4)
    assert largest < 1e-6
    assert [*scales] == (["score"] if task == "regression" else [])


def test_a_module_with_other_weights_is_distinguished(case: Case) -> None:
    with pytest.raises(GateFailed, match="export gate, scores: 'score' differs from torch in"):
        check_scores(case.model, with_reference(case.network, Weighing()), case.schema, case.golden, 1e-4)


def wrong_from(rows: int, model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with a kernel that goes wrong as soon as a batch has so many rows."""
    broken = deepcopy(model)
    graph = broken.graph
    graph.node[-1].output[0] = "right"
    graph.initializer.append(helper.make_tensor("limit", onnx.TensorProto.INT64, [1], [rows]))
    graph.node.extend(
        [
            helper.make_node("Shape", ["right"], ["size"], end=1),
            helper.make_node("GreaterOrEqual", ["size", "limit"], ["large"]),
            helper.make_node("Cast", ["large"], ["error"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Add", ["right", "error"], ["score"]),
        ]
    )
    return broken


@pytest.mark.parametrize(("rows", "caught_at"), [(1, 1), (5, 7), (8, 8), (20, 20)])
def test_a_graph_that_goes_wrong_at_some_batch_size_is_refused(case: Case, rows: int, caught_at: int) -> None:
    with pytest.raises(GateFailed, match=f"at batch size {caught_at}, first in row 100"):
        check_scores(wrong_from(rows, case.model), case.network, case.schema, case.golden, 1e-4)


def test_every_batch_size_is_tried_that_the_golden_rows_can_fill() -> None:
    assert [batch_sizes(rows) for rows in (1, 8, 256)] == [
        (1,),
        (1, 2, 3, 7, 8),
        (1, 2, 3, 7, 8, 9, 16, 63, 64, 65, 256),
    ]
    assert batch_sizes(8, 1024)[-2:] == (8, 1024)


def split(case: Case, target: Callable[[np.ndarray], np.ndarray]) -> list[tuple[np.ndarray, ...]]:
    num, cat = np.nan_to_num(case.golden.num), case.golden.cat.astype(np.int64)
    return [(num[:12], cat[:12], target(num[:12, 0])), (num[12:], cat[12:], target(num[12:, 0]))]


def test_the_test_split_is_measured_by_both(case: Case) -> None:
    batches = split(case, lambda x: (x > 0).astype(np.float32))
    rows, by_torch, by_onnx = check_metric(case.network, batches, "binary", 1e-4, {})
    assert rows == ROWS
    assert by_torch.keys() == by_onnx.keys() == {"auc", "logloss"}


def test_weights_that_do_not_measure_as_training_said_are_refused(case: Case) -> None:
    batches = split(case, lambda x: (x > 0).astype(np.float32))
    with pytest.raises(GateFailed, match="export gate, checkpoint: logloss on the test split: training 9"):
        check_metric(case.network, batches, "binary", 1e-4, {"test_logloss": 9.0})


def test_a_network_that_measures_otherwise_than_torch_is_refused(case: Case) -> None:
    batches = split(case, lambda x: (x > 0).astype(np.float32))
    with pytest.raises(GateFailed, match=r"export gate, metric: .* on the test split: exported network"):
        check_metric(with_reference(case.network, Weighing()), batches, "binary", 1e-4, {})


def test_a_split_with_one_class_is_measured_without_auc_and_an_empty_one_not_at_all(case: Case) -> None:
    _, by_torch, _ = check_metric(case.network, split(case, np.zeros_like), "binary", 1e-4, {})
    assert by_torch.keys() == {"logloss"}
    with pytest.raises(GateFailed, match="is empty"):
        check_metric(case.network, [], "binary", 1e-4, {})


SIZES = (6,)
SHAPE = TableShape(numeric=3, sizes=SIZES, outputs=1, units=True)
SCHEMA = Schema(task="regression", inputs=INPUTS, outputs=outputs_of("regression"))
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
    copy = deepcopy(graph)
    for name, known in KNOWN.items():
        (tensor,) = (one for one in copy.graph.initializer if np.all(numpy_helper.to_array(one) == known))
        like = np.full_like(numpy_helper.to_array(tensor), units[name])
        tensor.CopyFrom(numpy_helper.from_array(like, tensor.name))
    plain = network_margins(module)

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
    golden = GoldenRows(
        table=None, inputs={"x": num, "c": cat}, numeric=("a", "b", "c"), categorical=("d",), num=num,
        cat=cat.astype(np.int32), row=np.arange(GOLDEN),
    )  # fmt: skip
    model = fuse(identity_features(3), graph or given.graph, SCHEMA)
    scales, largest = check_scores(model, given, SCHEMA, golden, TOLERANCE)
    return scales["score"], largest


def changed_leaves(graph: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """The graph with one leaf of another sign, for the largest leaf and for the median one."""
    for place in (-1, 0):
        copy = deepcopy(graph)
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
    copy = deepcopy(graph)
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
