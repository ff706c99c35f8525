"""Contenders that score the same rows: the bundle's core, plain ONNX Runtime, torch eager and compiled, OpenVINO, bare
products."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

Score = Callable[[], np.ndarray[Any, Any]]
_made: dict[str, Score] = {}


def ours(request: dict[str, Any], num: Any, cat: Any) -> Score:
    from pathlib import Path

    from serin.scoring.session import open_session

    core, threads = ("fp32_core", "fp32_threads") if request["exact"] else ("core", "ort_threads")
    session = open_session(Path(request[core]), threads=request[threads])
    return lambda: np.asarray(session.run(["score"], {"num": num, "cat": cat})[0])


def ours_fp32(request: dict[str, Any], num: Any, cat: Any) -> Score:
    return ours({**request, "exact": True}, num, cat)


def onnxruntime(request: dict[str, Any], num: Any, cat: Any) -> Score:
    import onnxruntime as ort

    session = ort.InferenceSession(request["plain"], providers=["CPUExecutionProvider"])
    return lambda: np.asarray(session.run(["score"], {"num": num, "cat": cat})[0])


def torch_eager(request: dict[str, Any], num: Any, cat: Any) -> Score:
    return _torch(request, num, cat, compiled=False)


def torch_compile(request: dict[str, Any], num: Any, cat: Any) -> Score:
    return _torch(request, num, cat, compiled=True)


def _torch(request: dict[str, Any], num: Any, cat: Any, *, compiled: bool) -> Score:
    from pathlib import Path

    import torch

    from serin.models.build import load_model

    torch.set_num_threads(request["threads"])
    network = load_model(Path(request["weights"]))

    def forward(rows: Any, columns: Any) -> Any:
        return torch.sigmoid(network(rows, columns))

    answer = torch.compile(forward) if compiled else forward
    numbers, codes = torch.from_numpy(num), torch.from_numpy(cat)

    def score() -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            result: np.ndarray[Any, Any] = answer(numbers, codes).numpy()
        return result

    return score


def openvino(request: dict[str, Any], num: Any, cat: Any) -> Score:
    import openvino as ov

    core = ov.Core()
    options = {"INFERENCE_NUM_THREADS": request["threads"], "PERFORMANCE_HINT": "LATENCY"}
    if request["exact"]:
        options["INFERENCE_PRECISION_HINT"] = "f32"
    model = core.compile_model(core.read_model(request["plain"]), "CPU", options)
    asked = model.create_infer_request()
    return lambda: np.asarray(asked.infer({"num": num, "cat": cat}, share_inputs=True)[0])


def limit(request: dict[str, Any], num: Any, _cat: Any) -> Score:
    """Computes the network's matrix products alone, on arrays in memory."""
    import onnx

    weights = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in onnx.load(request["plain"]).graph.initializer
        if len(tensor.dims) == 2 and tensor.dims[0] <= 1024
    ]
    layers = [
        (np.ones((len(num), each.shape[1]), np.float32), np.ascontiguousarray(each.T)) for each in weights
    ]

    def score() -> np.ndarray[Any, Any]:
        for left, right in layers:
            left @ right
        return np.empty((0, 1), np.float32)

    return score


def run(request: dict[str, Any]) -> dict[str, Any]:
    score = _made[request["case"]] if request["case"] in _made else _prepare(request)
    begin = time.perf_counter()
    for _ in range(request["times"]):
        found = score()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "scores": found[:256, 0].astype(float).tolist()}


def _prepare(request: dict[str, Any]) -> Score:
    """Loads, compiles and runs once; none of this is timed."""
    rows = np.load(request["rows"])
    makers = (ours, ours_fp32, onnxruntime, torch_eager, torch_compile, openvino, limit)
    maker = next(each for each in makers if each.__name__ == request["who"])
    score = maker(request, rows["num"], rows["cat"])
    for _ in range(3):
        score()
    _made[request["case"]] = score
    return score
