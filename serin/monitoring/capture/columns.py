"""Decoded requests as rows of the records: natural types, real nulls, masked and dropped columns. Nothing loops over
rows."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.captures import ANSWER, LIVE, METADATA, column_names
from serin.formats.nulls import TYPE_OF_KIND, from_wire, without_null_strings
from serin.formats.schema import OutputTensor, Schema
from serin.formats.serving.recorded import RecordedBlock, Strings, Values

_LATEST_S = 253_370_764_800.0  # the year 9999, the last that a folder's name can hold


def block_rows(
    release: str, schema: Schema, block: RecordedBlock, *, drop: Collection[str] = (), now: float = 0.0
) -> pa.Table:
    """The rows of a block. Inputs that the block does not have are null, those in `drop` are left out. `now`: for
    requests without a valid time."""
    counts = block.request_rows.astype(np.int64)
    columns = {**_metadata(release, block, counts, now), **_inputs(schema, block, drop)}
    for tensor, values, given in zip(schema.outputs, block.outputs, block.given, strict=True):
        columns[f"{ANSWER}{tensor.name}"] = _answers(values, math.prod(tensor.dims), given, counts)
    return pa.table(columns)


def _inputs(schema: Schema, block: RecordedBlock, drop: Collection[str]) -> dict[str, pa.Array]:
    names = column_names([column.name for column in schema.inputs])
    columns = {}
    for column, values in zip(schema.inputs, block.inputs, strict=True):
        if column.name in drop:
            continue
        width = math.prod(column.dims)
        if values is None:
            kind = TYPE_OF_KIND[column.kind]
            columns[names[column.name]] = pa.nulls(block.rows, kind if width == 1 else pa.list_(kind))
        else:
            plain = values.to_arrow() if isinstance(values, Strings) else values
            flat = from_wire(column.kind, plain, column.null_texts)
            columns[names[column.name]] = listed(flat, block.rows, width)
    return columns


def _answers(
    values: Values, width: int, given: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64]
) -> pa.Array:
    """An output's values, null in the rows of requests that do not have it."""
    rows = int(counts.sum())
    flat = values.to_arrow() if isinstance(values, Strings) else pa.array(values)
    found = listed(flat, rows, width)
    if given.all():
        return found
    return pc.if_else(pa.array(np.repeat(given, counts)), found, pa.scalar(None, found.type))


def _metadata(
    release: str, block: RecordedBlock, counts: npt.NDArray[np.int64], now: float
) -> dict[str, pa.Array]:
    began = np.repeat(np.cumsum(counts) - counts, counts)
    t = np.where(np.isfinite(block.t), block.t, now).clip(0, _LATEST_S)
    of_request = {
        "_id": block.ids.to_arrow(),
        "_client_id": without_null_strings(block.client_ids.to_arrow()),
        "_t": pa.array((t * 1e6).round().astype(np.int64)).cast(METADATA["_t"]),
        "_arm": without_null_strings(block.arms.to_arrow()),
        "_epoch": pa.array(block.epoch, mask=block.epoch < 0),
        "_status": pa.array(block.code),
        "_latency_ms": pa.array((block.us / 1000).astype(np.float32), mask=np.isnan(block.us)),
    }
    single = bool((counts == 1).all())
    request = pa.array(np.repeat(np.arange(block.requests), counts))
    columns = {name: each if single else each.take(request) for name, each in of_request.items()}
    columns["_row"] = pa.array((np.arange(block.rows) - began).astype(np.int32))
    columns["_release"] = pa.repeat(release, block.rows)
    columns["_source"] = pa.repeat(LIVE, block.rows)
    return {name: columns[name] for name in METADATA}


def listed(flat: pa.Array, rows: int, width: int) -> pa.Array:
    """One list per row where a row has several values."""
    if width == 1:
        return flat
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * width), flat)


def recorded_answers(recorded: pa.Table, output: OutputTensor) -> npt.NDArray[np.float64] | None:
    """Returns the recorded answers as [rows, *dims] floats; None for a class number or what is not recorded."""
    name = f"{ANSWER}{output.name}"
    if output.dtype != "FP32" or name not in recorded.column_names:
        return None
    values = recorded.column(name).combine_chunks()
    while pa.types.is_nested(values.type):
        values = values.flatten()
    flat = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    rows = recorded.num_rows
    fits = len(flat) == rows * int(np.prod(output.dims))
    return np.reshape(flat, (rows, *output.dims)) if fits else None
