"""Uses golden rows as Triton's warm-up: a release scores realistic rows before it reports that it is ready.

Triton reads the value of each input for one row from a file, `<model>/warmup/<name>`, and repeats it to fill the batch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2

from serin.formats.bundle import Golden
from serin.formats.schema import InputColumn
from serin.formats.wire import Array

FOLDER = "warmup"
CPU_ROWS = (1, 64)
GPU_ROWS = (1, 8, 64, 256)  # libraries choose their kernels by the size at its first use

_KINDS = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT64": "TYPE_INT64", "INT8": "TYPE_INT8"}


def add_warm_up(
    config: Any, inputs: Sequence[InputColumn], sizes: Sequence[int], golden: Golden | None
) -> dict[str, bytes]:
    """Adds one sample for each batch size, each from another golden row, or zeros. Returns the files."""
    files: dict[str, bytes] = {}
    rows = sorted({min(size, config.max_batch_size) for size in sizes})
    for number, size in enumerate(rows):
        sample = config.model_warmup.add(name=f"{size} rows", batch_size=size, count=1)
        for position, column in enumerate(inputs):
            tensor = sample.inputs[column.name]
            tensor.data_type = model_config_pb2.DataType.Value(_KINDS[column.dtype])
            tensor.dims.extend(column.dims)
            if golden is None or not len(golden):
                tensor.zero_data = True
                continue
            name = f"{number}-{position}.bin"  # a column may have any name, a file may not
            files[f"{FOLDER}/{name}"] = _row(golden.inputs, column, number % len(golden))
            tensor.input_data_file = name
    return files


def _row(columns: Mapping[str, Array], column: InputColumn, row: int) -> bytes:
    values = np.asarray(columns[column.name][row]).reshape(-1)
    if column.dtype != "BYTES":
        return values.tobytes()
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in values]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)
