"""Tensors of the Open Inference Protocol as bytes: HTTP's binary form both ways, and the request message of gRPC."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from serin.formats.schema import Schema
from serin.formats.wire import Array

HEADER_BYTES = "inference-header-content-length"

_NUMPY = {
    "BOOL": "?", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "u1", "UINT16": "<u2",
    "UINT32": "<u4", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor. `data`: little-endian, row after row; for BYTES each value after its length (uint32)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encode(columns: Mapping[str, Array], schema: Schema) -> list[Tensor]:
    """Encodes the schema's columns, which have their wire types already."""
    return [
        Tensor(
            column.name,
            column.dtype,
            columns[column.name].shape,
            tensor_bytes(columns[column.name], column.dtype),
        )
        for column in schema.inputs
    ]


def http_body(tensors: Iterable[Tensor]) -> tuple[bytes, int]:
    """Returns a request's body and the length of its JSON part, which goes into the header HEADER_BYTES."""
    listed = list(tensors)
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.dtype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in listed
    ]
    head = json.dumps(
        {"inputs": inputs, "parameters": {"binary_data_output": True}}, ensure_ascii=False
    ).encode()
    return b"".join([head, *(tensor.data for tensor in listed)]), len(head)


def grpc_request(model: str, tensors: Iterable[Tensor], version: int | None = None) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, model_version=str(version) if version else "")
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.dtype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    return message


def read_http_answer(body: bytes, head_bytes: int | None) -> dict[str, Array]:
    """Returns the outputs by name; ValueError when the body is not a valid answer."""
    end = len(body) if head_bytes is None else head_bytes
    try:
        listed = json.loads(body[:end])["outputs"]
        found: dict[str, Array] = {}
        for output in listed:
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                kind = object if output["datatype"] == "BYTES" else _NUMPY[output["datatype"]]
                found[output["name"]] = np.array(output["data"], dtype=kind).reshape(output["shape"])
                continue
            found[output["name"]] = _array(body[end : end + size], output["datatype"], output["shape"])
            end += size
    except (KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return found


def tensor_bytes(values: Array, dtype: str) -> bytes:
    """Encodes the values of a tensor (`Tensor.data`)."""
    if dtype != "BYTES":
        return np.ascontiguousarray(values, dtype=_NUMPY[dtype]).tobytes()
    return bytes(serialize_byte_tensor(values.astype(object)).item()) if values.size else b""


def _array(data: bytes, dtype: str, shape: Sequence[int]) -> Array:
    if dtype != "BYTES":
        return np.frombuffer(data, dtype=_NUMPY[dtype]).reshape(shape)
    return np.asarray(deserialize_bytes_tensor(data)).reshape(shape)
