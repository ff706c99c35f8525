"""Prepares the runtime benchmark: one trained network, exported for each batch size, and the files that peers load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq

NUMBERS, TEXTS, VOCABULARY = 13, 8, 2000
VARIANTS = ["fp32", "fp16", "int8", "int8_dynamic", "int8_embeddings"]


def make_table(path: Path, rows: int) -> None:
    """Writes numbers and strings with a learnable target."""
    random = np.random.default_rng(1)
    numbers = random.normal(size=(rows, NUMBERS)).astype(np.float32)
    codes = random.zipf(1.3, size=(rows, TEXTS)) % VOCABULARY
    effect = random.normal(size=(TEXTS, VOCABULARY))
    signal = numbers[:, 0] - numbers[:, 1] * numbers[:, 2] + effect[np.arange(TEXTS), codes].sum(axis=1)
    columns: dict[str, Any] = {f"n{index}": numbers[:, index] for index in range(NUMBERS)}
    columns |= {f"t{index}": pa.array([f"v{code}" for code in codes[:, index]]) for index in range(TEXTS)}
    columns["y"] = (signal + random.normal(size=rows) > 0).astype(np.float64)
    pq.write_table(pa.table(columns), path)


def spec_of(table: Path, hidden: list[int], batch_rows: int, variants: list[str]) -> dict[str, Any]:
    return {
        "name": "runtime",
        "data": {"tables": {"rows": str(table)}, "target": {"expression": "y > 0.5", "task": "binary"}},
        "features": [
            {"columns": [f"n{index}" for index in range(NUMBERS)], "steps": ["fill_median", "normalize"]},
            {"columns": [f"t{index}" for index in range(TEXTS)], "steps": ["categorify"]},
        ],
        "model": {"kind": "mlp", "hidden": hidden, "embedding": 16},
        "training": {"epochs": 2, "batch_rows": 1024, "learning_rate": 0.003, "processes": 1},
        "export": {"variants": variants, "batch_mix": {batch_rows: 1.0}, "target": "cpu"},
        "serving": {"max_batch_rows": 4096},
    }


def _variants(batch_rows: int) -> list[str]:
    """Returns the variants to build. float16 on a CPU takes seconds for thousands of rows; 1 and 64 rows show that it
    loses."""
    return [name for name in VARIANTS if name != "fp16" or batch_rows <= 64]


def make_bundles(
    folder: Path, *, rows: int, hidden: list[int], batches: tuple[int, ...], say: Callable[[str], None]
) -> dict[int, dict[str, Any]]:
    """Returns for each batch size the core and threads that the export chose, the same for fp32 only, and the peers'
    network."""
    os.environ["SERIN_HOME"] = str(folder / "home")
    from serin.formats.shards import read_split
    from serin.pipeline.run_stage import run_etl, run_export, run_train
    from serin.spec.load import load_spec

    table = folder / "rows.parquet"
    make_table(table, rows)
    checkpoint = run_train(load_spec(spec_of(table, hidden, 1, ["fp32"]))).value
    made: dict[int, dict[str, Any]] = {}
    for size in batches:
        say(f"exporting for requests of {size} rows")
        exact = load_spec(spec_of(table, hidden, size, ["fp32"]))
        spec = load_spec(spec_of(table, hidden, size, _variants(size)))
        exact_core, exact_gate = _exported(Path(run_export(exact).value.path))
        core, gate = _exported(Path(run_export(spec).value.path))
        test = read_split(run_etl(spec).value.path, "test").whole()
        rows_file = folder / f"rows-{size}.npz"
        np.savez(rows_file, num=test.num[:size], cat=test.cat[:size].astype(np.int64))
        made[size] = {
            "core": str(core), "weights": checkpoint.path, "plain": str(folder / "plain.onnx"), "rows": str(rows_file),
            "ort_threads": gate["runtime"]["threads"], "chosen": gate["chosen"], "variants": gate["variants"],
            "fp32_core": str(exact_core), "fp32_threads": exact_gate["runtime"]["threads"],
        }  # fmt: skip
    _write_plain(Path(checkpoint.path), folder / "plain.onnx")
    return made


def _exported(bundle: Path) -> tuple[Path, dict[str, Any]]:
    """Writes the network of a bundle to a file beside it and returns the gate's results."""
    core = bundle.parent / f"{bundle.name}-core.onnx"
    onnx.save(core_of_bundle(onnx.load(bundle / "model.onnx")), core)
    gate: dict[str, Any] = json.loads((bundle / "gate.json").read_text())
    return core, gate


def core_of_bundle(model: onnx.ModelProto) -> onnx.ModelProto:
    """Extracts the network and the answer from a bundle's graph, with `num` and `cat` as inputs."""
    inside = [node for node in model.graph.node if node.name.startswith(("network/", "answer/"))]
    inside = inside or [node for node in model.graph.node if any("network/" in name for name in node.output)]
    given = {name for node in inside for name in node.output}
    weights = {tensor.name for tensor in model.graph.initializer}
    names = dict.fromkeys(
        name for node in inside for name in node.input if name and name not in given and name not in weights
    )
    core = onnx.utils.Extractor(onnx.shape_inference.infer_shapes(model)).extract_model(
        list(names), ["score"]
    )
    for tensor in core.graph.input:
        short = "num" if tensor.type.tensor_type.elem_type == onnx.TensorProto.FLOAT else "cat"
        for node in core.graph.node:
            for place, name in enumerate(node.input):
                node.input[place] = short if name == tensor.name else name
        tensor.name = short
    onnx.checker.check_model(core)
    return core


def _write_plain(weights: Path, path: Path) -> None:
    """Exports the network with torch's exporter and the sigmoid, as peers would."""
    from serin.export.convert.torch2onnx import torch2onnx
    from serin.formats.weights import read_weights
    from serin.models.build import load_model
    from serin.models.shape import TableShape

    shape = read_weights(weights).model.shape
    table = TableShape(numeric=shape.numeric, sizes=shape.sizes, outputs=shape.outputs)
    model = torch2onnx(load_model(weights), table)
    model.graph.node.append(onnx.helper.make_node("Sigmoid", ["logits"], ["score"]))
    model.graph.output[0].name = "score"
    onnx.save(model, path)
