"""Asks a served model with Triton's stock clients: nothing here that any other client could not do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from serin.errors import PredictionFailed, RowsUnfit, nearest
from serin.formats.schema import Schema
from serin.formats.wire import Array

Protocol = Literal["http", "grpc"]

_NUMPY = {"BYTES": np.object_, "FP32": np.float32, "INT64": np.int64, "INT8": np.int8}
_LIBRARIES = {"http": tritonclient.http, "grpc": tritonclient.grpc}


def predict(
    url: str,
    model: str,
    rows: Mapping[str, Array],
    schema: Schema,
    protocol: Protocol = "http",
    version: int | None = None,
    *,
    timeout_s: float = 10.0,
    batch_rows: int = 256,
) -> dict[str, Array]:
    """The model's outputs for `rows` (wire form, one [rows, 1] array per column), `batch_rows` of them per request."""
    columns = request_columns(rows, schema)
    count = len(next(iter(columns.values())))
    library = _LIBRARIES[protocol]
    address = url.removeprefix("http://").rstrip("/")
    options: dict[str, Any] = {"model_version": str(version) if version else ""}
    settings: dict[str, Any] = {}
    if protocol == "http":
        settings = {"connection_timeout": timeout_s, "network_timeout": timeout_s}
    else:
        options["client_timeout"] = timeout_s
    batches = []
    try:
        with library.InferenceServerClient(address, **settings) as client:
            for start in range(0, max(count, 1), batch_rows):
                batch = {name: values[start : start + batch_rows] for name, values in columns.items()}
                answer = client.infer(model, infer_inputs(library, batch, schema), **options)
                batches.append([answer.as_numpy(output.name) for output in schema.outputs])
    except InferenceServerException as error:
        raise PredictionFailed(
            model=model, status=error.status() or "with an error", reason=error.message()
        ) from error
    except OSError as error:
        raise PredictionFailed(model=model, status="nothing", reason=f"{address}: {error}") from error
    joined = map(np.concatenate, zip(*batches, strict=True))
    return {output.name: values for output, values in zip(schema.outputs, joined, strict=True)}


def request_columns(rows: Mapping[str, Array], schema: Schema) -> dict[str, Array]:
    """The schema's columns of `rows` as [rows, *dims] arrays of wire types; RowsUnfit names one that does not fit."""
    columns: dict[str, Array] = {}
    for column in schema.inputs:
        if column.name not in rows:
            raise RowsUnfit(column=column.name, reason=f"is missing{nearest(column.name, rows)}")
        columns[column.name] = np.asarray(rows[column.name], dtype=_NUMPY[column.dtype])
        columns[column.name] = columns[column.name].reshape(-1, *column.dims)
        if len(columns[column.name]) != len(columns[schema.inputs[0].name]):
            raise RowsUnfit(column=column.name, reason="has another number of rows than the first column")
    return columns


def infer_inputs(library: Any, columns: Mapping[str, Array], schema: Schema) -> list[Any]:
    """`columns` as the inputs of one of tritonclient's libraries."""
    inputs = []
    for column in schema.inputs:
        values = columns[column.name]
        tensor = library.InferInput(column.name, list(values.shape), column.dtype)
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    return inputs
