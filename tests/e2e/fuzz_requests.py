"""Requests that no good client would send, drawn by hypothesis: what is asked, and how it is delivered."""

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
_BYTES = st.binary(max_size=8)
_REGION = {"shared_memory_region": "/etc/passwd", "shared_memory_byte_size": 8, "shared_memory_offset": 0}
_PATHS = [
    f"/v2/models/{MODEL}/infer", f"/v2/models/{MODEL}/versions/1/infer", f"/v2/models/{MODEL}/versions/99/infer",
    f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/ready", "/v2/models/none/infer", "/v2/repository/index", "/v2", "/",
    f"/v2/models/{MODEL}/infer?x=" + "y" * 2000, "/v2/models/%00/infer", f"/v2/models/{MODEL}/infer/../config",
]  # fmt: skip

# Strategies are made once: hypothesis looks each new one through before it draws from it, and that is dear.
_UP_TO = {most: st.integers(0, most) for most in (1, 2, 3, 4, 5, 7, 9, 14, 15, 19, 24, 39)}
_FAULTS = st.sampled_from([0, 0, 0, 0, 0, 1, 1, 2])
_NAME = st.sampled_from([*_COLUMNS, "zz", "", "x" * 300])
_TYPE = st.sampled_from(_TYPES)
_SHAPE = st.lists(_SIZES, max_size=4)
_ANY_NAME, _ANY_SHAPE = _NAME | st.text(max_size=5), _SHAPE | _JSON
_TIMES = st.sampled_from([0, 1, 2, 65, 1000])
_PARAMETERS = st.sampled_from([_REGION, {"binary_data_size": 8}, {"x": 1}, None, 3])
_KEY = st.sampled_from(["name", "shape", "data", "datatype"])
_MANY_ROWS = st.sampled_from([2, 64, 65, 300])
_OUTPUT_NAME = st.sampled_from(["score", "none", ""])
_OUTPUT = st.fixed_dictionaries(
    {"name": _OUTPUT_NAME},
    optional={
        "parameters": st.sampled_from(
            [{"classification": 2**31}, {"binary_data": True}, _REGION, {"x": []}, None]
        )
    },
)
_OUTPUTS = st.lists(_OUTPUT, max_size=3) | _JSON
_KNOWN = ["sequence_id", "sequence_start", "priority", "timeout", "binary_data_output", "headers", "x"]
_REQUEST_PARAMETERS = st.dictionaries(st.sampled_from(_KNOWN), _JSON, max_size=3) | _JSON
_ID = st.text(max_size=10) | _JSON
_BINARY_ROWS = st.sampled_from([1, 2, 64, 70])
_LENGTH = st.sampled_from([0, 3, 2**32 - 1])
_TOO_MANY = st.sampled_from([0, 0, 0, 0, 1, -1, 2**31, -(2**40)])
_OTHER_ROWS = st.sampled_from([None, None, None, 1, 2**40, 0, -1])
_BEGINS = st.sampled_from([None] * 6 + ["0", "-1", "1", "9 times", "x", "", str(2**64)])
_LEFT = st.sampled_from([None] * 3 + [0, 1, -1])
_SPOIL = st.binary(max_size=60)
_DEEP = st.sampled_from([b"[" * 1_000_000, b'{"inputs":' * 50_000, b"0" * 300_000, b'"' + b"a" * 70_000])
_SQUEEZE = st.sampled_from([gzip.compress, zlib.compress, lambda data: data])
_ENCODING = st.sampled_from(["gzip", "deflate", "br", "identity", "x", ""])
_PATH = st.sampled_from([_PATHS[0]] * 30 + _PATHS)
_METHOD = st.sampled_from(["POST"] * 25 + ["GET", "PUT", "HEAD", "OPTIONS", "TRACE", "DELETE"])
_ODD_HEADERS = st.lists(
    st.sampled_from(
        [("x-long", "y" * 9000), ("expect", "100-continue"), ("te", "trailers"), ("upgrade", "h2c"), ("", "x"),
         ("content-type", "application/grpc"), ("x-serin-arm", "candidate"), ("x-envoy-retry-on", "5xx"), ("a b", "c"),
         ("content-length", "7"), ("connection", "upgrade"), ("host", "y"), ("accept-encoding", "gzip, deflate"),
         ("x-serin-model", "delays"), ("x-serin-may", "*"), ("cookie", "a=b;" * 200), ("x-bad", "a\tb"),
         ("inference-header-content-length", "7"),
         ("triton-grpc-error", "true")]
    ),
    max_size=3,
)  # fmt: skip
_GRPC_METHOD = st.sampled_from(
    ["ModelInfer"] * 25 + ["ModelReady", "ModelMetadata", "ServerLive", "ModelConfig"]
)
_MODEL_NAME = st.sampled_from([MODEL] * 8 + ["none", "", "x" * 600])
_MODEL_VERSION = st.sampled_from([""] * 5 + ["1", "99", "-1", "x"])
_GRPC_ROWS = st.sampled_from([1, 1, 2, 64, 65])
_CHUNKS = st.sampled_from([0, 0, 0, 1, 7, 1000])
_PIECES = st.sampled_from([11, 200])


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
    for _ in range(draw(_FAULTS)):
        match draw(_UP_TO[7]):
            case 0:
                changed["name"] = draw(_ANY_NAME)
            case 1:
                changed["datatype"] = draw(_TYPE)
            case 2:
                changed["shape"] = draw(_ANY_SHAPE)
            case 3:
                changed["data"] = draw(_JSON)
            case 4:
                changed["data"] = [draw(_JSON)] * draw(_TIMES)
            case 5:
                changed["parameters"] = draw(_PARAMETERS)
            case 6:
                changed.pop(draw(_KEY), None)
            case _:
                rows = draw(_MANY_ROWS)
                changed["shape"], changed["data"] = [rows, 1], (tensor["data"] * rows)
    return changed


_TENSORS = [_tensor(tensor) for tensor in good_inputs()]


@st.composite
def _json_body(draw: Draw) -> bytes:
    inputs = [draw(tensor) for tensor in _TENSORS]
    if draw(_UP_TO[5]) == 0:
        inputs = inputs[: draw(_UP_TO[3])] + inputs[: draw(_UP_TO[2])]
    request: dict[str, Any] = {"inputs": inputs}
    if draw(_UP_TO[3]) == 0:
        request["outputs"] = draw(_OUTPUTS)
    if draw(_UP_TO[3]) == 0:
        request["parameters"] = draw(_REQUEST_PARAMETERS)
    if draw(_UP_TO[5]) == 0:
        request["id"] = draw(_ID)
    return json.dumps(request).encode()


@st.composite
def _binary_body(draw: Draw) -> tuple[bytes, str]:
    """Binary tensors whose sizes may lie; with the value of the header that tells where they begin."""
    rows = draw(_BINARY_ROWS)
    lengths = [2] * rows
    for _ in range(draw(_UP_TO[2])):
        lengths[draw(st.integers(0, rows - 1))] = draw(_LENGTH)
    carrier = b"".join(struct.pack("<I", length) + b"AA" for length in lengths)
    data = {"carrier": carrier, "temp": b"\0" * 4 * rows, "distance": b"\0" * 8 * rows, "night": b"\0" * rows}
    inputs = []
    for tensor in good_inputs():
        size = len(data[tensor["name"]]) + draw(_TOO_MANY)
        other = draw(_OTHER_ROWS)
        shape = [rows if other is None else rows + 1 if other == 1 else other, 1]
        kind = {"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape}
        inputs.append({**kind, "parameters": {"binary_data_size": size}})
    head = json.dumps({"inputs": inputs}).encode()
    begins = {None: str(len(head)), "9 times": str(9 * len(head))}
    drawn, tail, left = draw(_BEGINS), b"".join(data.values()), draw(_LEFT)
    return head + tail[:left], begins.get(drawn, drawn or "")


_JSON_BODY, _BINARY_BODY = _json_body(), _binary_body()


@st.composite
def http_requests(draw: Draw) -> HttpRequest:
    headers = {"host": "x"}
    match draw(_UP_TO[9]):
        case 0 | 1 | 2 | 3:
            body = draw(_JSON_BODY)
        case 4 | 5:
            body, begins = draw(_BINARY_BODY)
            headers["inference-header-content-length"] = begins
        case 6:
            body = _spoiled(draw, good_body())
        case 7:
            body = draw(_SPOIL)
        case 8:
            body = draw(_DEEP)
        case _:
            squeeze = draw(_SQUEEZE)
            headers["content-encoding"] = draw(_ENCODING)
            body = squeeze(good_body() if draw(_UP_TO[1]) else b"\0" * 1_000_000)
    path, method = draw(_PATH), draw(_METHOD)
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if draw(_UP_TO[2]) == 0:
        lines += [f"{name}: {value}" for name, value in draw(_ODD_HEADERS)]
    chunks = draw(_CHUNKS)
    if chunks and len(body) < 5000:
        lines.append("transfer-encoding: chunked")
        body = _chunked(body, chunks)
    elif draw(_UP_TO[15]):
        lines.append(f"content-length: {len(body)}")
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()
    lengths = [line for line in lines if line.startswith(("content-length", "transfer-encoding"))]
    if lengths == ["content-length: 7"] and len(body) < 7:
        return HttpRequest(head, body, 100_000, 0.0, None, False)  # the rest of it never comes
    if draw(_UP_TO[24]) == 0:
        head = _spoiled(draw, head)
        return HttpRequest(head, body, 100_000, 0.0, None, False)
    size = len(head) + len(body)
    cut = draw(st.integers(0, size)) if draw(_UP_TO[14]) == 0 else None
    slow = draw(_UP_TO[19]) == 0
    pieces = draw(_PIECES) if slow and size < 5000 else 100_000
    return HttpRequest(head, body, pieces, 0.002 if slow else 0.0, cut, True)


@st.composite
def grpc_calls(draw: Draw) -> GrpcCall:
    service = "/inference.GRPCInferenceService/"
    method = draw(_GRPC_METHOD)
    message = _message(draw).SerializeToString()
    if draw(_UP_TO[4]) == 0:
        message = _spoiled(draw, message)
    frame = framed(message)
    match draw(_UP_TO[15]):
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
    if draw(_UP_TO[5]) == 0:
        name = draw(st.sampled_from(sorted(odd)))
        headers[name] = odd[name]
    return GrpcCall(service + method, frame, headers)


def _message(draw: Draw) -> Any:
    name = draw(_MODEL_NAME)
    version = draw(_MODEL_VERSION)
    request = service_pb2.ModelInferRequest(model_name=name, model_version=version)
    rows = draw(_GRPC_ROWS)
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
    if draw(_UP_TO[9]) == 0:
        request.outputs.add(name=draw(_OUTPUT_NAME))
    if draw(_UP_TO[9]) == 0:
        name = draw(st.sampled_from(["priority", "timeout", "sequence_id", "x"]))
        request.parameters[name].int64_param = draw(_SIZES)
    return request


def _spoil_input(draw: Draw, entry: Any, rows: int) -> None:
    wrong = draw(_UP_TO[39])
    if wrong == 0:
        entry.name = draw(_NAME)
    elif wrong == 1:
        entry.datatype = draw(_TYPE)
    elif wrong == 2:
        del entry.shape[:]
        entry.shape.extend(draw(_SHAPE))
    elif wrong == 3:
        entry.parameters["shared_memory_region"].string_param = "x"
    elif wrong == 4:
        entry.contents.fp32_contents.extend([0.5] * rows)
    elif wrong == 5:
        entry.contents.bytes_contents.extend([b"\xff\xfe"] * rows)


def _spoiled_values(draw: Draw, data: bytes) -> bytes | None:
    match draw(_UP_TO[39]):
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
    instead = draw(st.sampled_from([b"", data[start:end] * 2, b"\0", b"\r\n"]) | _BYTES)
    return data[:start] + instead + data[end:]


def _chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
