"""Requests that no good client would send, drawn by hypothesis: what is asked, and how it is delivered."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from serin.formats.wire import Array
from tests.e2e.serving_stack import good_inputs
from tests.unit.serving.bundles import MODEL

Draw = st.DrawFn

_COLUMNS = [tensor["name"] for tensor in good_inputs()]
_TYPES = ["BYTES", "FP32", "INT64", "INT8", "BOOL", "UINT64", "FP64", "FP16", "BF16", "INVALID", "", "fp32"]
_SIZES = st.sampled_from(
    [0, 1, 2, 3, -1, 64, 65, 100_000, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)]
)
_ODD: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 2**63, 2**64, -(2**70), "", "x", "\0", "\ud800", "ü雪",
    "1", "NaN", [], [[]], [None], [1, [2, [3]]], ["a", 1, None], {}, {"": 0}, {"name": []}, {"shape": [1]}, [{}],
    [[1]] * 9,
    {"data": {"data": {"data": 1}}}, [True, False], ["x" * 3000], [[["deep"]]], {"binary_data": "yes"}, [10**400],
]  # fmt: skip
_JSON = st.sampled_from(_ODD) | st.integers() | st.text(max_size=8)
_REGION = {"shared_memory_region": "/etc/passwd", "shared_memory_byte_size": 8, "shared_memory_offset": 0}
_PATHS = [
    f"/v2/models/{MODEL}/infer", f"/v2/models/{MODEL}/versions/1/infer", f"/v2/models/{MODEL}/versions/99/infer",
    f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/ready", "/v2/models/none/infer", "/v2/repository/index", "/v2", "/",
    f"/v2/models/{MODEL}/infer?x=" + "y" * 2000, "/v2/models/%00/infer", f"/v2/models/{MODEL}/infer/../config",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class HttpRequest:
    head: bytes
    body: bytes
    pieces: int  # bytes per write
    pause_s: float  # between the first writes
    cut: int | None  # so many bytes are sent, then the connection is closed
    framed: bool  # False: bytes that are no request, so that no answer is owed


@dataclass(frozen=True, slots=True)
class GrpcCall:
    method: str
    frame: bytes
    headers: dict[str, str]


def good_body() -> bytes:
    return json.dumps({"inputs": good_inputs()}).encode()


def good_rows() -> dict[str, Array]:
    kinds = {"BYTES": object, "FP32": np.float32, "INT64": np.int64, "INT8": np.int8}
    return {
        tensor["name"]: np.array(tensor["data"], dtype=kinds[tensor["datatype"]]).reshape(1, 1)
        for tensor in good_inputs()
    }


def good_frame() -> bytes:
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    for name, values in good_rows().items():
        kind = next(tensor["datatype"] for tensor in good_inputs() if tensor["name"] == name)
        request.inputs.add(name=name, datatype=kind, shape=[1, 1])
        text = str(values[0, 0]).encode()
        request.raw_input_contents.append(
            struct.pack("<I", len(text)) + text if kind == "BYTES" else values.tobytes()
        )
    return framed(request.SerializeToString())


def framed(message: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(message)) + message


@st.composite
def _tensor(draw: Draw, tensor: dict[str, Any]) -> dict[str, Any]:
    """A good input with up to two things wrong: most are good, so that each fault is met alone, too."""
    changed = dict(tensor)
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 0, 1, 1, 2]))):
        match draw(st.integers(0, 7)):
            case 0:
                changed["name"] = draw(
                    st.sampled_from([*_COLUMNS, "zz", "", "x" * 300]) | st.text(max_size=5)
                )
            case 1:
                changed["datatype"] = draw(st.sampled_from(_TYPES))
            case 2:
                changed["shape"] = draw(st.lists(_SIZES, max_size=4) | _JSON)
            case 3:
                changed["data"] = draw(_JSON)
            case 4:
                changed["data"] = [draw(_JSON)] * draw(st.sampled_from([0, 1, 2, 65, 1000]))
            case 5:
                changed["parameters"] = draw(
                    st.sampled_from([_REGION, {"binary_data_size": 8}, {"x": 1}, None, 3])
                )
            case 6:
                changed.pop(draw(st.sampled_from(["name", "shape", "data", "datatype"])), None)
            case _:
                rows = draw(st.sampled_from([2, 64, 65, 300]))
                changed["shape"], changed["data"] = [rows, 1], (tensor["data"] * rows)
    return changed


@st.composite
def _json_body(draw: Draw) -> bytes:
    inputs = [draw(_tensor(tensor)) for tensor in good_inputs()]
    if draw(st.integers(0, 5)) == 0:
        inputs = inputs[: draw(st.integers(0, 3))] + inputs[: draw(st.integers(0, 2))]
    request: dict[str, Any] = {"inputs": inputs}
    if draw(st.integers(0, 3)) == 0:
        names = st.sampled_from(["score", "none", ""])
        parameters = st.sampled_from(
            [{"classification": 2**31}, {"binary_data": True}, _REGION, {"x": []}, None]
        )
        request["outputs"] = draw(
            st.lists(st.fixed_dictionaries({"name": names}, optional={"parameters": parameters}), max_size=3)
            | _JSON
        )
    if draw(st.integers(0, 3)) == 0:
        known = ["sequence_id", "sequence_start", "priority", "timeout", "binary_data_output", "headers", "x"]
        request["parameters"] = draw(st.dictionaries(st.sampled_from(known), _JSON, max_size=3) | _JSON)
    if draw(st.integers(0, 5)) == 0:
        request["id"] = draw(st.text(max_size=10) | _JSON)
    return json.dumps(request).encode()


@st.composite
def _binary_body(draw: Draw) -> tuple[bytes, str]:
    """Binary tensors whose sizes may lie; with the value of the header that tells where they begin."""
    rows = draw(st.sampled_from([1, 2, 64, 70]))
    carrier = b"".join(
        struct.pack("<I", draw(st.sampled_from([2, 2, 2, 0, 3, 2**32 - 1]))) + b"AA" for _ in range(rows)
    )
    data = {"carrier": carrier, "temp": b"\0" * 4 * rows, "distance": b"\0" * 8 * rows, "night": b"\0" * rows}
    inputs = []
    for tensor in good_inputs():
        size = len(data[tensor["name"]]) + draw(st.sampled_from([0, 0, 0, 0, 1, -1, 2**31, -(2**40)]))
        shape = [draw(st.sampled_from([rows, rows, rows, rows + 1, 2**40, 0, -1])), 1]
        kind = {"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape}
        inputs.append({**kind, "parameters": {"binary_data_size": size}})
    head = json.dumps({"inputs": inputs}).encode()
    begins = draw(
        st.sampled_from([str(len(head))] * 6 + ["0", "-1", "1", str(len(head) * 9), "x", "", str(2**64)])
    )
    tail = b"".join(data.values())
    return head + tail[: draw(st.sampled_from([len(tail)] * 3 + [0, 1, len(tail) - 1]))], begins


@st.composite
def http_requests(draw: Draw) -> HttpRequest:
    headers = {"host": "x"}
    match draw(st.integers(0, 9)):
        case 0 | 1 | 2 | 3:
            body = draw(_json_body())
        case 4 | 5:
            body, begins = draw(_binary_body())
            headers["inference-header-content-length"] = begins
        case 6:
            body = _spoiled(draw, good_body())
        case 7:
            body = draw(st.binary(max_size=60))
        case 8:
            body = draw(
                st.sampled_from(
                    [b"[" * 1_000_000, b'{"inputs":' * 50_000, b"0" * 300_000, b'"' + b"a" * 70_000]
                )
            )
        case _:
            squeeze = draw(st.sampled_from([gzip.compress, zlib.compress, lambda data: data]))
            headers["content-encoding"] = draw(
                st.sampled_from(["gzip", "deflate", "br", "identity", "x", ""])
            )
            body = squeeze(draw(st.sampled_from([good_body(), b"\0" * 1_000_000])))
    path = draw(st.sampled_from([_PATHS[0]] * 30 + _PATHS))
    method = draw(st.sampled_from(["POST"] * 25 + ["GET", "PUT", "HEAD", "OPTIONS", "TRACE", "DELETE"]))
    odd = st.sampled_from(
        [("x-long", "y" * 9000), ("expect", "100-continue"), ("te", "trailers"), ("upgrade", "h2c"), ("", "x"),
         ("content-type", "application/grpc"), ("x-serin-arm", "candidate"), ("x-envoy-retry-on", "5xx"), ("a b", "c"),
         ("content-length", "7"), ("connection", "upgrade"), ("host", "y"), ("accept-encoding", "gzip, deflate"),
         ("x-serin-model", "delays"), ("x-serin-may", "*"), ("cookie", "a=b;" * 200), ("x-bad", "a\tb"),
         ("inference-header-content-length", "7"),
         ("triton-grpc-error", "true")]
    )  # fmt: skip
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if draw(st.integers(0, 2)) == 0:
        lines += [f"{name}: {value}" for name, value in draw(st.lists(odd, max_size=3))]
    chunks = draw(st.sampled_from([0, 0, 0, 1, 7, 1000]))
    if chunks and len(body) < 5000:
        lines.append("transfer-encoding: chunked")
        body = _chunked(body, chunks)
    elif draw(st.integers(0, 15)):
        lines.append(f"content-length: {len(body)}")
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()
    if draw(st.integers(0, 24)) == 0:
        head = _spoiled(draw, head)
        return HttpRequest(head, body, 100_000, 0.0, None, False)
    size = len(head) + len(body)
    cut = draw(st.integers(0, size)) if draw(st.integers(0, 14)) == 0 else None
    slow = draw(st.integers(0, 19)) == 0
    pieces = draw(st.sampled_from([11, 200])) if slow and size < 5000 else 100_000
    return HttpRequest(head, body, pieces, 0.002 if slow else 0.0, cut, True)


@st.composite
def grpc_calls(draw: Draw) -> GrpcCall:
    service = "/inference.GRPCInferenceService/"
    method = draw(
        st.sampled_from(["ModelInfer"] * 25 + ["ModelReady", "ModelMetadata", "ServerLive", "ModelConfig"])
    )
    message = _message(draw).SerializeToString()
    if draw(st.integers(0, 4)) == 0:
        message = _spoiled(draw, message)
    frame = framed(message)
    match draw(st.integers(0, 15)):
        case 0:
            frame = bytes([draw(st.sampled_from([1, 2, 255]))]) + frame[1:]
        case 1:
            frame = b"\0" + struct.pack(">I", draw(st.sampled_from([0, 1, 2**31, 2**32 - 1]))) + message
        case 2:
            frame = frame[: draw(st.integers(0, len(frame)))]
        case 3:
            frame = frame + frame
        case 4:
            packed = gzip.compress(message)
            frame = b"\1" + struct.pack(">I", len(packed)) + packed
    headers = {"content-type": "application/grpc", "te": "trailers"}
    odd = {"x": "y" * 9000, "grpc-timeout": "1n", "grpc-encoding": "gzip", "content-type": "application/grpc+json",
           "content-encoding": "gzip", "grpc-accept-encoding": "gzip", "x-serin-model": "other",
           "grpc-bin": "!!!"}  # fmt: skip
    if draw(st.integers(0, 5)) == 0:
        name = draw(st.sampled_from(sorted(odd)))
        headers[name] = odd[name]
    return GrpcCall(service + method, frame, headers)


def _message(draw: Draw) -> Any:
    name = draw(st.sampled_from([MODEL] * 8 + ["none", "", "x" * 600]))
    version = draw(st.sampled_from([""] * 5 + ["1", "99", "-1", "x"]))
    request = service_pb2.ModelInferRequest(model_name=name, model_version=version)
    rows = draw(st.sampled_from([1, 1, 2, 64, 65]))
    values = {
        "carrier": (struct.pack("<I", 2) + b"AA") * rows,
        "temp": b"\0" * 4 * rows,
        "distance": b"\0" * 8 * rows,
        "night": b"\0" * rows,
    }
    for tensor in good_inputs():
        entry = request.inputs.add(name=tensor["name"], datatype=tensor["datatype"])
        entry.shape.extend([rows, 1])
        _spoil_input(draw, entry, rows)
        data = _spoiled_values(draw, values[tensor["name"]])
        if data is not None:
            request.raw_input_contents.append(data)
    if draw(st.integers(0, 9)) == 0:
        request.outputs.add(name=draw(st.sampled_from(["score", "none", ""])))
    if draw(st.integers(0, 9)) == 0:
        name = draw(st.sampled_from(["priority", "timeout", "sequence_id", "x"]))
        request.parameters[name].int64_param = draw(_SIZES)
    return request


def _spoil_input(draw: Draw, entry: Any, rows: int) -> None:
    wrong = draw(st.integers(0, 39))
    if wrong == 0:
        entry.name = draw(st.sampled_from([*_COLUMNS, "zz", "", "x" * 300]))
    elif wrong == 1:
        entry.datatype = draw(st.sampled_from(_TYPES))
    elif wrong == 2:
        del entry.shape[:]
        entry.shape.extend(draw(st.lists(_SIZES, max_size=4)))
    elif wrong == 3:
        entry.parameters["shared_memory_region"].string_param = "x"
    elif wrong == 4:
        entry.contents.fp32_contents.extend([0.5] * rows)
    elif wrong == 5:
        entry.contents.bytes_contents.extend([b"\xff\xfe"] * rows)


def _spoiled_values(draw: Draw, data: bytes) -> bytes | None:
    match draw(st.integers(0, 39)):
        case 0:
            return None
        case 1:
            return data[: draw(st.integers(0, len(data)))]
        case 2:
            return draw(st.binary(max_size=20))
        case 3:
            return struct.pack("<I", 2**32 - 1) + data
        case _:
            return data


def _spoiled(draw: Draw, data: bytes) -> bytes:
    """Some bytes cut, doubled or replaced."""
    start = draw(st.integers(0, max(len(data) - 1, 0)))
    end = draw(st.integers(start, min(len(data), start + 40)))
    instead = draw(st.sampled_from([b"", data[start:end] * 2, b"\0", b"\r\n"]) | st.binary(max_size=8))
    return data[:start] + instead + data[end:]


def _chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
