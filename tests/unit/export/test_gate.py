from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.errors import GateFailed
from serin.export.convert.features2onnx import FeatureGraph
from serin.export.convert.fuse import fuse
from serin.export.convert.network import Network, torch_reference
from serin.export.gate.gate import batch_sizes, check_features, check_metric, check_scores
from serin.export.gate.golden import GoldenRows
from serin.formats.schema import Schema, Task, input_columns, outputs_of

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
    return Network(graph=model, reference=torch_reference(module), made_by="torch")


def with_reference(network: Network, module: Weighing) -> Network:
    return replace(network, reference=torch_reference(module))


def make_case(task: Task = "binary", outputs: int = 1) -> Case:
    torch.manual_seed(2)
    module = Weighing(outputs)
    network = network_of(module)
    graph = GraphBuilder("inner/")
    num, cat = graph.op("Identity", "x"), graph.op("Identity", "c")
    fed = {"x": (ELEMENT_OF_DTYPE["FP32"], ("batch", 1)), "c": (ELEMENT_OF_DTYPE["INT64"], ("batch", 1))}
    given = {num: (onnx.TensorProto.FLOAT, ("batch", 1)), cat: (onnx.TensorProto.INT64, ("batch", 1))}
    features = FeatureGraph(model=graph.to_model(fed, given), num=num, cat=cat)
    entries = [
        {"name": "x", "kind": "float", "dtype": "FP32"},
        {"name": "c", "kind": "int", "dtype": "INT64"},
    ]
    schema = Schema(task=task, inputs=input_columns(entries), outputs=outputs_of(task, outputs))
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
    broken = onnx.ModelProto()
    broken.CopyFrom(model)
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
