"""Triton's config.pbtxt for a bundle, complete: nothing is left for Triton to guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serin import environment
from serin.artifacts import Release
from serin.formats.schema import InputColumn, OutputTensor, Schema
from serin.spec.stages import ServingSpec

SHAPE_FOLDER = environment.application_folder() / "triton_models" / "onnx_python"

_TYPES = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT64": "TYPE_INT64", "INT8": "TYPE_INT8"}
_WARM_ROWS = (1, 64)


def write_config(
    schema: Schema,
    model: str,
    version: int,
    *,
    serving: ServingSpec | None = None,
    instances: int = 1,
    threads: int = 1,
) -> str:
    """The text of config.pbtxt. `instances` are processes of their own; each scores with `threads` threads."""
    serving = ServingSpec() if serving is None else serving
    release = Release(model=model, version=version)
    config = text_format.Parse((SHAPE_FOLDER / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    config.name = release.model
    config.max_batch_size = serving.max_batch_rows
    config.version_policy.specific.versions.append(release.version)
    for column in schema.inputs:
        config.input.add(name=column.name, data_type=_type(column), dims=column.dims)
    for output in schema.outputs:
        config.output.add(name=output.name, data_type=_type(output), dims=output.dims)
    config.instance_group.add(kind="KIND_CPU", count=instances)
    config.parameters["ort_threads"].string_value = str(threads)
    for rows in sorted({min(rows, serving.max_batch_rows) for rows in _WARM_ROWS}):
        _add_warm_up(config, schema.inputs, rows)
    return str(text_format.MessageToString(config))


def _add_warm_up(config: Any, inputs: Sequence[InputColumn], rows: int) -> None:
    sample = config.model_warmup.add(name=f"{rows} rows", batch_size=rows, count=1)
    for column in inputs:
        tensor = sample.inputs[column.name]
        tensor.data_type = model_config_pb2.DataType.Value(_type(column))
        tensor.dims.extend(column.dims)
        tensor.zero_data = True


def _type(tensor: InputColumn | OutputTensor) -> str:
    return _TYPES[tensor.dtype]
