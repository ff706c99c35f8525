"""Runs where TensorRT for RTX is installed: `python -m tests.unit.export.rtx_probe FOLDER` builds an engine of every
graph in FOLDER (*.onnx), and writes what came of it to FOLDER/found.json."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx

from serin.errors import ExportFailed
from serin.export.convert.onnx2rtx import build_rtx_engine, rtx_reason, runtime_refusal
from serin.export.convert.onnx2trt import build_plan
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
    told = {key: value for key, value in asdict(engine).items() if key != "plan"}
    return {
        **told,
        "bytes": len(engine.plan),
        "precisions": engine.precisions(),
        "runtime": runtime_refusal(engine.plan),
    }


def plan_like_tensorrt(graph: onnx.ModelProto, timings: Path) -> bytes:
    """TensorRT's libraries are not on PyPI; its namesake has the same Python API, so it takes its place."""
    sys.modules["tensorrt"] = sys.modules["tensorrt_rtx_bindings"]
    return build_plan(graph, max_rows=MAX_ROWS, timing_cache=timings)


if __name__ == "__main__":
    main()
