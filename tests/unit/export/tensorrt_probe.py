"""Runs where TensorRT for RTX is installed: `python -m tests.unit.export.tensorrt_probe FOLDER` builds an engine of
every graph in FOLDER (*.onnx), and writes what came of it to FOLDER/found.json."""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import onnx

from serin.errors import ExportFailed
from serin.export.convert.onnx2trt import build_plan, collecting_logger

MAX_ROWS = 256
LIBRARIES = ("libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1")  # the second needs the first


def main() -> None:
    folder = Path(sys.argv[1])
    api = load_api()
    sys.modules["tensorrt"] = api
    graphs = {path.stem: onnx.load(path) for path in sorted(folder.glob("*.onnx"))}
    found = {name: look_at(api, graph, folder / "timings") for name, graph in graphs.items()}
    (folder / "found.json").write_text(json.dumps(found))


def load_api() -> Any:
    """The bindings, which find the libraries only when those are loaded already."""
    import tensorrt_rtx_libs

    for name in LIBRARIES:
        ctypes.CDLL(str(Path(next(iter(tensorrt_rtx_libs.__path__))) / name), mode=ctypes.RTLD_GLOBAL)
    import tensorrt_rtx_bindings

    return tensorrt_rtx_bindings


def look_at(api: Any, graph: onnx.ModelProto, timings: Path) -> dict[str, Any]:
    try:
        plan = build_plan(graph, max_rows=MAX_ROWS, timing_cache=timings)
    except ExportFailed as error:
        return {"refused": error.fields["reason"]}
    return {"bytes": len(plan), **parsed(api, graph)}


def parsed(api: Any, graph: onnx.ModelProto) -> dict[str, Any]:
    """What the parser understood: the tensors around the network, and the types of its layers' outputs by kind."""
    logger = collecting_logger(api, [])
    builder = api.Builder(logger)
    network = builder.create_network(0)
    assert api.OnnxParser(network, logger).parse(graph.SerializeToString())
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    tensors += [network.get_output(index) for index in range(network.num_outputs)]
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    types = [(each.type.name, each.get_output(0).dtype.name) for each in layers if each.num_outputs]
    return {"tensors": [(each.name, each.dtype.name, list(each.shape)) for each in tensors], "types": types}


if __name__ == "__main__":
    main()
