"""Runs where TensorRT for RTX is installed: `python -m tests.unit.export.rtx_probe FOLDER` builds an engine of every
graph in FOLDER (*.onnx), and writes what came of it to FOLDER/found.json."""

import json
import sys
from pathlib import Path
from typing import Any

import onnx

from serin.errors import ExportFailed
from serin.export.convert.onnx2trt import (
    _collecting_logger,
    _load_api,
    build_plan,
    build_rtx_engine,
    rtx_reason,
)
from serin.scoring.session import provider_refusal

MAX_ROWS = 256


def main() -> None:
    folder = Path(sys.argv[1])
    graphs = {path.stem: onnx.load(path) for path in sorted(folder.glob("*.onnx"))}
    found: dict[str, Any] = {name: look_at(graph) for name, graph in graphs.items()}
    found["reason"] = rtx_reason(graphs["hand"], max_rows=MAX_ROWS)
    found["refused reason"] = rtx_reason(graphs["foreign"], max_rows=MAX_ROWS)
    found["provider"] = provider_refusal()
    found["other capability"] = look_at(graphs["hand"], capabilities=("9.0",))
    found["plan bytes"] = len(plan_like_tensorrt(graphs["hand"], folder / "timings"))
    (folder / "found.json").write_text(json.dumps(found))


def look_at(graph: onnx.ModelProto, **asked: Any) -> dict[str, Any]:
    try:
        engine = build_rtx_engine(graph, max_rows=MAX_ROWS, **asked)
    except ExportFailed as error:
        return {"refused": error.fields["reason"]}
    return {
        "bytes": len(engine.plan),
        "precisions": engine.precisions,
        "runtime": runtime_refusal(engine.plan),
        **parsed(graph),
    }


def parsed(graph: onnx.ModelProto) -> dict[str, Any]:
    """What the parser understood: the tensors around the network, and the types of its layers' outputs by kind."""
    api = _load_api()
    logger = _collecting_logger(api, [])
    builder = api.Builder(logger)
    network = builder.create_network(0)
    assert api.OnnxParser(network, logger).parse(graph.SerializeToString())
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    tensors += [network.get_output(index) for index in range(network.num_outputs)]
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    types = [(each.type.name, each.get_output(0).dtype.name) for each in layers if each.num_outputs]
    return {"tensors": [(each.name, each.dtype.name, list(each.shape)) for each in tensors], "types": types}


def runtime_refusal(plan: bytes) -> str:
    """Why the runtime does not load an engine here, in its own words; empty when it does."""
    api, lines = _load_api(), list[str]()
    runtime = api.Runtime(_collecting_logger(api, lines))
    return "" if runtime.deserialize_cuda_engine(plan) is not None else "; ".join(lines) or "no reason given"


def plan_like_tensorrt(graph: onnx.ModelProto, timings: Path) -> bytes:
    """TensorRT's libraries are not on PyPI; its namesake has the same Python API, so it takes its place."""
    sys.modules["tensorrt"] = sys.modules["tensorrt_rtx_bindings"]
    return build_plan(graph, max_rows=MAX_ROWS, timing_cache=timings)


if __name__ == "__main__":
    main()
