"""Decodes requests and answers in plain Python, value by value: what the compiled decoder is compared with."""

import json
import struct
from functools import partial
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from serin.formats.schema import INT64_NULL, Schema
from serin.formats.serving.ring import ALL, GRPC
from tests.kit.rings import Exchange

DTYPES = {"FP32": np.float32, "INT64": np.int64, "INT8": np.int8}
NULLS = {"FP32": float("nan"), "INT64": INT64_NULL, "INT8": -1, "BYTES": ""}
CONTENTS = {
    "BOOL": "bool_contents", "FP32": "fp32_contents", "INT64": "int64_contents", "INT8": "int_contents",
    "BYTES": "bytes_contents",
}  # fmt: skip

Found = dict[str, tuple[str, list[int], Any]]


class Unreadable(Exception):
    """As the compiled decoder, it takes an entry completely or not at all."""


def rows_of(exchange: Exchange, schema: Schema, hidden: set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of each input, and of each output or None, as flat lists."""
    if exchange.protocol == GRPC:
        request, answer, classes = _grpc(exchange)
    else:
        request, classes = _json(exchange.request, exchange.request_json, "inputs")
        answer, _ = _json(exchange.answer, exchange.answer_json, "outputs")
    rows, inputs = None, {}
    for column in schema.inputs:
        if column.name not in request:
            continue
        dtype, shape, data = request[column.name]
        if dtype != column.dtype and (dtype, column.dtype) != ("BOOL", "INT8"):
            raise Unreadable
        if (
            not shape
            or int(np.prod(shape[1:], dtype=object)) != int(np.prod(column.dims))
            or rows not in (None, shape[0])
        ):
            raise Unreadable
        rows = shape[0]
        if column.name not in hidden:
            inputs[column.name] = _values(column.dtype, data, int(np.prod(shape, dtype=object)))
    if rows is None:
        raise Unreadable
    for column in schema.inputs:
        if column.name not in request and column.name not in hidden:
            inputs[column.name] = _values(column.dtype, [None] * rows * int(np.prod(column.dims)), None)
    outputs = {each.name: _output(each, answer, classes, rows) for each in schema.outputs}
    return inputs, outputs


def _output(output: Any, answer: Found, classes: set[str], rows: int) -> Any:
    dtype, shape, data = answer.get(output.name, ("", [], None))
    fits = dtype == output.dtype or (dtype, output.dtype) == ("BOOL", "INT8")
    if not fits or not shape or shape[0] != rows or data is None or output.name in classes:
        return None
    if int(np.prod(shape[1:], dtype=object)) != int(np.prod(output.dims)):
        return None
    return _values(output.dtype, data, int(np.prod(shape, dtype=object)))


def _values(dtype: str, data: Any, count: int | None) -> list[Any]:
    plain = data() if callable(data) else data  # a hidden column is not looked at
    values = [NULLS[dtype] if each is None else each for each in _flat(plain)]
    if count is not None and len(values) != count:
        raise Unreadable
    if dtype == "BYTES":
        return [_text(each) for each in values]
    if any(isinstance(each, str | bytes) for each in values):
        raise Unreadable
    if dtype == "FP32":
        with np.errstate(over="ignore"):
            return [np.float64(each).astype(np.float32).tobytes() for each in values]
    if any(each != int(each) for each in values):
        raise Unreadable
    try:
        return np.array([int(each) for each in values], DTYPES[dtype]).tolist()
    except OverflowError as error:
        raise Unreadable from error


def _flat(data: Any) -> list[Any]:
    if not isinstance(data, list):
        return [data]
    return [each for inner in data for each in _flat(inner)]


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if not isinstance(value, str):
        raise Unreadable
    return "".join("\ufffd" if "\ud800" <= each <= "\udfff" else each for each in value)


def _json(body: bytes, length: int, which: str) -> tuple[Found, set[str]]:
    behind = b"" if length == ALL else body[length:]
    try:
        document = json.loads(body if length == ALL else body[:length], parse_constant=_constant)
        found: Found = {}
        for each in document[which]:
            parameters = each.get("parameters", {})
            data = each.get("data")
            if (size := parameters.get("binary_data_size")) is not None:
                if size > len(behind):
                    raise Unreadable
                data, behind = partial(_raw, each["datatype"], behind[:size]), behind[size:]
            if each["name"] in found:
                raise Unreadable
            found[each["name"]] = each["datatype"], each["shape"], data
        asked = document.get("outputs", []) if which == "inputs" else []
        classes = {each["name"] for each in asked if "classification" in each.get("parameters", {})}
    except (ValueError, KeyError) as error:
        raise Unreadable from error
    if behind:
        raise Unreadable
    return found, classes


def _constant(word: str) -> float:
    return float(word)


def _raw(dtype: str, data: bytes) -> list[Any]:
    if dtype != "BYTES":
        kind = np.dtype({"BOOL": np.bool_, **DTYPES}[dtype])
        if len(data) % kind.itemsize:
            raise Unreadable
        return np.frombuffer(data, kind).tolist()
    found = []
    while data:
        if len(data) < 4 or len(data) - 4 < (length := struct.unpack_from("<I", data)[0]):
            raise Unreadable
        found.append(data[4 : 4 + length])
        data = data[4 + length :]
    return found


def _grpc(exchange: Exchange) -> tuple[Found, Found, set[str]]:
    request = service_pb2.ModelInferRequest.FromString(exchange.request)
    answer = service_pb2.ModelInferResponse.FromString(exchange.answer)
    classes = {each.name for each in request.outputs if "classification" in each.parameters}
    inputs = _messages(request.inputs, request.raw_input_contents)
    return inputs, _messages(answer.outputs, answer.raw_output_contents), classes


def _messages(tensors: Any, raw: Any) -> Found:
    found: Found = {}
    for place, each in enumerate(tensors):
        if raw:
            data = partial(_raw, each.datatype, raw[place])
        else:
            data = list(getattr(each.contents, CONTENTS[each.datatype]))
        found[each.name] = each.datatype, list(each.shape), data
    return found
