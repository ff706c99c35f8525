"""The model that every server of the benchmark serves: four strings and six numbers in, a score out, one ONNX file.

Its size is that of the flights example: vocabularies of 4,000 words, embeddings of 16, layers of 128 and 64.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
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
from serin.store.artifacts import Bundle
from serin.store.store import Store

Columns = dict[str, np.ndarray[Any, Any]]

NAME = "serving-benchmark"
TEXTS, NUMBERS, WORDS, WIDTH, HIDDEN = 4, 6, 4_000, 16, (128, 64)
SCHEMA = Schema(
    task="binary",
    inputs=(
        *(
            InputColumn(name=f"t{index}", dtype="BYTES", kind="string", null=NULL_OF_KIND["string"])
            for index in range(TEXTS)
        ),
        *(
            InputColumn(name=f"n{index}", dtype="FP32", kind="float", null=NULL_OF_KIND["float"])
            for index in range(NUMBERS)
        ),
    ),
    outputs=(OutputTensor(name="score", dtype="FP32", dims=(1,)),),
)


def rows(count: int, seed: int = 0) -> Columns:
    """Returns rows in wire form; one word in ten is unknown to the model."""
    draw = np.random.default_rng(seed)
    columns: Columns = {}
    for index in range(TEXTS):
        words = draw.integers(0, int(WORDS * 1.1), count)
        columns[f"t{index}"] = np.array([f"word-{word}" for word in words], dtype=object).reshape(-1, 1)
    for index in range(NUMBERS):
        columns[f"n{index}"] = draw.normal(size=(count, 1)).astype(np.float32)
    return columns


def score(path: Path, columns: Columns) -> np.ndarray[Any, Any]:
    """Scores the columns in this process; every server must give the same answer."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["score"], columns)[0])


def publish(store: Store, *, queue_delay_us: int, more: Mapping[str, Any] | None = None) -> Bundle:
    """Publishes the next version. `more`: further settings, by section of the spec."""
    version = store.reserve_version(NAME)
    with store.workspace() as folder:
        onnx.save(graph(), folder / "model.onnx")
        write_schema(folder, SCHEMA)
        own = {"threads": 1, "max_batch_rows": 256, "queue_delay": f"{queue_delay_us}us"}
        settings = {**(more or {}), "serving": {**own, **(more or {}).get("serving", {})}}
        (folder / "spec.yaml").write_text(json.dumps(settings))
        golden = rows(40, seed=7)
        table = {name: pa.array(values.reshape(-1)) for name, values in golden.items()}
        table["score"] = pa.array(score(folder / "model.onnx", golden).reshape(-1))
        table["row"] = pa.array(np.arange(40))
        pq.write_table(pa.table(table), folder / "golden.parquet")
        write_manifest(folder, name=NAME, model_version=version, spec_digest="0" * 64, lineage={}, metrics={})
        return store.publish_bundle(NAME, version, folder)


def graph() -> onnx.ModelProto:
    draw = np.random.default_rng(1)
    nodes, weights, parts = [], [], []

    def weight(name: str, *shape: int) -> str:
        scale = 1 / np.sqrt(shape[0])
        weights.append(numpy_helper.from_array((draw.normal(size=shape) * scale).astype(np.float32), name))
        return name

    for index in range(TEXTS):
        keys = [f"word-{word}" for word in range(WORDS)]
        nodes.append(
            helper.make_node(
                "LabelEncoder", [f"t{index}"], [f"code{index}"], domain="ai.onnx.ml", keys_strings=keys,
                values_int64s=list(range(1, WORDS + 1)), default_int64=0,
            )
        )  # fmt: skip
        table = weight(f"table{index}", WORDS + 1, WIDTH)
        nodes.append(helper.make_node("Gather", [table, f"code{index}"], [f"found{index}"]))
        nodes.append(helper.make_node("Reshape", [f"found{index}", "flat"], [f"part{index}"]))
        parts.append(f"part{index}")
    weights.append(numpy_helper.from_array(np.array([-1, WIDTH], np.int64), "flat"))
    parts += [f"n{index}" for index in range(NUMBERS)]
    nodes.append(helper.make_node("Concat", parts, ["layer0"], axis=1))
    sizes = [TEXTS * WIDTH + NUMBERS, *HIDDEN, 1]
    for layer, (wide, out) in enumerate(itertools.pairwise(sizes)):
        last = layer == len(HIDDEN)
        gemm = [f"layer{layer}", weight(f"w{layer}", wide, out), weight(f"b{layer}", out)]
        nodes.append(helper.make_node("Gemm", gemm, ["logit" if last else f"dense{layer}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"dense{layer}"], [f"layer{layer + 1}"]))
    nodes.append(helper.make_node("Sigmoid", ["logit"], ["score"]))
    kinds = {"BYTES": TensorProto.STRING, "FP32": TensorProto.FLOAT}
    built = helper.make_graph(
        nodes,
        NAME,
        [helper.make_tensor_value_info(column.name, kinds[column.dtype], ["batch", 1]) for column in SCHEMA.inputs],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch", 1])],
        weights,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(built, opset_imports=opsets, ir_version=10)
