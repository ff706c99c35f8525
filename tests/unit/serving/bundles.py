"""A small bundle made by hand: a string, a float, an int and a bool in, a score out."""

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper, numpy_helper

from serin.formats.bundle import write_manifest
from serin.formats.schema import NULL_OF_KIND, InputColumn, OutputTensor, Schema, write_schema
from serin.formats.wire import Array
from serin.store.artifacts import Bundle
from serin.store.store import Store

MODEL = "delays"
SCHEMA = Schema(
    task="binary",
    inputs=(
        InputColumn(name="carrier", dtype="BYTES", kind="string", null=NULL_OF_KIND["string"]),
        InputColumn(name="temp", dtype="FP32", kind="float", null=NULL_OF_KIND["float"]),
        InputColumn(name="distance", dtype="INT64", kind="int", null=NULL_OF_KIND["int"]),
        InputColumn(name="night", dtype="INT8", kind="bool", null=NULL_OF_KIND["bool"]),
    ),
    outputs=(OutputTensor(name="score", dtype="FP32", dims=(1,)),),
)


def rows(count: int, seed: int = 0) -> dict[str, Array]:
    """Request columns in wire form, nulls, unseen categories and letters beyond ASCII among them."""
    draw = np.random.default_rng(seed)
    carriers = np.array(["AA", "UA", "DL", "", "unseen", "Zürich 雪"], dtype=object)
    temp = draw.normal(size=count).astype(np.float32)
    temp[:: max(count // 4, 1)] = np.nan
    return {
        "carrier": draw.choice(carriers, size=count).astype(object).reshape(-1, 1),
        "temp": temp.reshape(-1, 1),
        "distance": draw.integers(-3, 3, size=count).reshape(-1, 1),
        "night": draw.integers(-1, 2, size=count).astype(np.int8).reshape(-1, 1),
    }


def asked_in_json(address: str, version: int, columns: Mapping[str, Array]) -> list[float]:
    """The scores that a server gives for JSON as the gateway writes it: nulls as NaN, the smallest int64, -1 and ""."""
    inputs = [
        {"name": each.name, "datatype": each.dtype, "shape": list(columns[each.name].shape),
         "data": columns[each.name].ravel().tolist()}
        for each in SCHEMA.inputs
    ]  # fmt: skip
    with closing(http.client.HTTPConnection(address, timeout=20)) as wire:
        wire.request("POST", f"/v2/models/{MODEL}/versions/{version}/infer", json.dumps({"inputs": inputs}))
        answer = json.loads(wire.getresponse().read())
    assert "outputs" in answer, answer
    return [float(each) for each in answer["outputs"][0]["data"]]


def infer_inputs(library: Any, columns: Mapping[str, Array], schema: Schema) -> list[Any]:
    """Returns `columns` as the inputs of one of tritonclient's libraries."""
    inputs = []
    for column in schema.inputs:
        values = columns[column.name]
        tensor = library.InferInput(column.name, list(values.shape), column.dtype)
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    return inputs


def score(folder: str | Path, columns: dict[str, Array]) -> Array:
    """What ONNX Runtime says in this process."""
    session = onnxruntime.InferenceSession(
        str(Path(folder) / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(["score"], columns)[0])


def publish(
    store: Store,
    *,
    bias: float,
    spec: str = "objectives: {latency_ms: 50}\nserving: {request_timeout: 4s}\n",
    in_two: bool = False,
    extra: dict[str, bytes] | None = None,
    model: str = MODEL,
    side: int = 0,
) -> Bundle:
    """The next version of `model`. `bias` is what tells its scores from those of another version. `in_two`: with a
    front and a core beside the whole graph, as for a GPU. `extra`: further files. `side`: see `graph`."""
    version = store.reserve_version(model)
    with store.workspace() as folder:
        onnx.save(graph(bias, side), folder / "model.onnx")
        if in_two:
            onnx.save(front(), folder / "front.onnx")
            onnx.save(core(bias), folder / "core.onnx")
        for name, data in (extra or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        write_schema(folder, SCHEMA)
        (folder / "spec.yaml").write_text(spec)
        columns = rows(40, seed=7)
        table = {name: pa.array(values.reshape(-1)) for name, values in columns.items()}
        table["score"] = pa.array(score(folder, columns).reshape(-1))
        table["row"] = pa.array(np.arange(40))
        pq.write_table(pa.table(table), folder / "golden.parquet")
        write_manifest(
            folder,
            name=model,
            model_version=version,
            spec_digest="0" * 64,
            lineage={},
            metrics={"test_auc": 0.7},
        )
        return store.publish_bundle(model, version, folder)


_TYPES = {
    "carrier": TensorProto.STRING,
    "temp": TensorProto.FLOAT,
    "distance": TensorProto.INT64,
    "night": TensorProto.INT8,
}
_KEYS = ["AA", "UA", "DL", "Zürich 雪"]
_CAST = {"distance": "far", "night": "dark"}
NUM, CAT = "features/num", "features/cat"
INNER = (
    OutputTensor(name=NUM, dtype="FP32", dims=(3,)),
    OutputTensor(name=CAT, dtype="INT64", dims=(1,)),
)


def graph(bias: float, side: int = 0) -> onnx.ModelProto:
    """`side`: a product of two square matrices of this size is computed for each request, and adds nothing."""
    keys = {"keys_strings": _KEYS, "values_floats": [1.0, 2.0, 3.0, 4.0], "default_float": 0.0}
    nodes = [
        helper.make_node("LabelEncoder", ["carrier"], ["code"], domain="ai.onnx.ml", **keys),
        *_filled(),
        *(_work(side) if side else ()),
        helper.make_node(
            "Sum", ["code", "filled", "far", "dark", "bias", *(["work"] if side else [])], ["logit"]
        ),
        helper.make_node("Sigmoid", ["logit"], ["score"]),
    ]
    return _model(nodes, _TYPES, {"score": (TensorProto.FLOAT, 1)}, {"bias": [bias], "zero": 0})


def _work(side: int) -> list[onnx.NodeProto]:
    """Depends on the request, so that no optimizer computes it once."""
    size = numpy_helper.from_array(np.array([side, side], np.int64))
    return [
        helper.make_node("Constant", [], ["size"], value=size),
        helper.make_node("ReduceMean", ["filled"], ["mean"], keepdims=0),
        helper.make_node("Expand", ["mean", "size"], ["square"]),
        helper.make_node("MatMul", ["square", "square"], ["product"]),
        helper.make_node("ReduceMean", ["product"], ["total"], keepdims=0),
        helper.make_node("Mul", ["total", "zero"], ["work"]),
    ]


def front() -> onnx.ModelProto:
    """The same up to the numbers: three of them and a code."""
    keys = {"keys_strings": _KEYS, "values_int64s": [1, 2, 3, 4], "default_int64": 0}
    nodes = [
        helper.make_node("LabelEncoder", ["carrier"], [CAT], domain="ai.onnx.ml", **keys),
        *_filled(),
        helper.make_node("Concat", ["filled", "far", "dark"], [NUM], axis=1),
    ]
    return _model(nodes, _TYPES, {NUM: (TensorProto.FLOAT, 3), CAT: (TensorProto.INT64, 1)}, {"zero": 0})


def choking_front() -> bytes:
    """The front with a table that has distances from -3 to 3: it fails on others."""
    model = front()
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array(3, np.int64), "three"),
            numpy_helper.from_array(np.arange(-3, 4, dtype=np.float32), "table"),
        ]
    )
    last = model.graph.node.pop()
    last.input[1] = "found"
    model.graph.node.extend(
        [
            helper.make_node("Add", ["distance", "three"], ["place"]),
            helper.make_node("Gather", ["table", "place"], ["found"]),
            last,
        ]
    )
    return bytes(model.SerializeToString())


def core(bias: float) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", [CAT], ["code"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", [NUM, "axis"], ["sum"], keepdims=1),
        helper.make_node("Sum", ["code", "sum", "bias"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["score"]),
    ]
    types = {NUM: (TensorProto.FLOAT, 3), CAT: (TensorProto.INT64, 1)}
    made = _model(nodes, types, {"score": (TensorProto.FLOAT, 1)}, {"bias": [bias]})
    made.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "axis"))
    return made


def _filled() -> list[onnx.NodeProto]:
    return [
        helper.make_node("IsNaN", ["temp"], ["missing"]),
        helper.make_node("Where", ["missing", "zero", "temp"], ["filled"]),
        *(helper.make_node("Cast", [name], [to], to=TensorProto.FLOAT) for name, to in _CAST.items()),
    ]


def _model(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, int | tuple[int, int]],
    outputs: Mapping[str, tuple[int, int]],
    constants: Mapping[str, float | list[float]],
) -> onnx.ModelProto:
    def infos(tensors: Mapping[str, int | tuple[int, int]]) -> list[onnx.ValueInfoProto]:
        wide = {name: kind if isinstance(kind, tuple) else (kind, 1) for name, kind in tensors.items()}
        return [
            helper.make_tensor_value_info(name, kind, ["batch", size]) for name, (kind, size) in wide.items()
        ]

    built = helper.make_graph(
        nodes,
        "hand-made",
        infos(inputs),
        infos(outputs),
        [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(built, opset_imports=opsets, ir_version=10)
