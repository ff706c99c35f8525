import numpy as np
import onnx
import pytest
from onnx import helper

from serin.columns.onnx_graph import ELEMENT_OF_DTYPE, GraphBuilder
from serin.errors import ExportFailed
from serin.export.convert.features2onnx import FeatureGraph
from serin.export.convert.fuse import fuse, name_model
from serin.export.session import open_session
from serin.formats.schema import Schema, Task, input_columns, outputs_of


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
