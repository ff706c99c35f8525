"""Blocks of the spool as rows of the records: natural types, real nulls, masked and dropped columns. Nothing loops
over rows."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.captures import ANSWER, METADATA, column_names
from serin.formats.nulls import TYPE_OF_KIND, from_wire, without_null_strings
from serin.formats.serving.spool import SpoolBlock, SpoolHeader, Strings

SHADOW_ID = "shadow-"
"""How the ids of requests begin that a replay sent to a release which answers nobody yet."""

_LATEST_S = 253_370_764_800.0  # the year 9999, the last that a folder's name can hold


def block_rows(
    header: SpoolHeader,
    block: SpoolBlock,
    logged: pa.Table | None = None,
    *,
    mask: Collection[str] = (),
    drop: Collection[str] = (),
    written: float = 0.0,
) -> pa.Table:
    """The rows of a block. `logged`: for each request arm, epoch, code, us and client_id from the request log, null
    where it has no line. `written`: when the file was written, for requests without a valid time."""
    counts = block.request_rows.astype(np.int64)
    request = np.repeat(np.arange(block.requests), counts)
    columns = {
        **_metadata(header, block, logged, counts, written, request),
        **_inputs(header, block, mask, drop),
    }
    for tensor, values in zip(header.outputs, block.outputs, strict=True):
        flat = text(values) if isinstance(values, Strings) else pa.array(values.reshape(-1))
        rows = len(flat) // max(tensor.width, 1)
        columns[f"{ANSWER}{tensor.name}"] = listed(flat, rows, tensor.width)
    return pa.table(columns)


def _inputs(
    header: SpoolHeader, block: SpoolBlock, mask: Collection[str], drop: Collection[str]
) -> dict[str, pa.Array]:
    names = column_names([tensor.name for tensor in header.inputs])
    columns = {}
    for tensor, values in zip(header.inputs, block.inputs, strict=True):
        if tensor.name in drop:
            continue
        if tensor.name in mask:
            kind = TYPE_OF_KIND[tensor.kind]
            columns[names[tensor.name]] = pa.nulls(block.rows, kind if tensor.width == 1 else pa.list_(kind))
        else:
            plain = text(values) if isinstance(values, Strings) else values.reshape(-1)
            flat = from_wire(tensor.kind, plain, header.null_texts.get(tensor.name, ()))
            columns[names[tensor.name]] = listed(flat, block.rows, tensor.width)
    return columns


def _metadata(
    header: SpoolHeader,
    block: SpoolBlock,
    logged: pa.Table | None,
    counts: npt.NDArray[np.int64],
    written: float,
    request: npt.NDArray[np.int64],
) -> dict[str, pa.Array]:
    ids = text(block.ids)
    began = np.repeat(np.cumsum(counts) - counts, counts)
    own = without_null_strings(text(block.client_ids))
    t = np.where(np.isfinite(block.t), block.t, written).clip(0, _LATEST_S)
    source = pc.if_else(pc.starts_with(ids, SHADOW_ID), "shadow", "live")
    of_request = {
        "_id": ids,
        "_client_id": own if logged is None else pc.coalesce(own, _combined(logged, "client_id")),
        "_t": pa.array((t * 1e6).round().astype(np.int64)).cast(METADATA["_t"]),
        "_source": source,
    }
    if logged is not None:
        of_request |= {
            "_arm": _combined(logged, "arm"),
            "_epoch": _combined(logged, "epoch"),
            "_status": _combined(logged, "code").cast(pa.int32()),
            "_latency_ms": pc.divide(_combined(logged, "us"), 1000.0).cast(pa.float32()),
        }
    single = block.rows == block.requests and bool((counts == 1).all())
    columns = {name: each if single else each.take(request) for name, each in of_request.items()}
    columns["_row"] = pa.array((np.arange(block.rows) - began).astype(np.int32))
    columns["_release"] = pa.repeat(header.release, block.rows)
    return {name: columns.get(name, pa.nulls(block.rows, kind)) for name, kind in METADATA.items()}


def text(values: Strings) -> pa.StringArray:
    """The values as strings; bytes that are not UTF-8 become replacement characters."""
    try:
        return values.to_arrow().cast(pa.large_string()).cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(values.to_list(), pa.string())


def listed(flat: pa.Array, rows: int, width: int) -> pa.Array:
    """One list per row where a row has several values."""
    if width == 1:
        return flat
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * width), flat)


def _combined(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
