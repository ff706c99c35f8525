"""Writes Triton's config.pbtxt for each model of a release, complete: nothing is left for Triton to infer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serin.formats.bundle import Golden
from serin.formats.schema import InputColumn, OutputTensor, Schema
from serin.machine.environment import application_folder
from serin.serving.client.tensors import tensor_bytes
from serin.serving.triton.backends import PLAN_PROFILE_ROWS
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Release

BACKENDS = application_folder() / "triton_models"
PYTHON_BACKEND = BACKENDS / "onnx_python"
MODEL_CODE = PYTHON_BACKEND / "1" / "model.py"

_TYPES = {"BYTES": "TYPE_STRING", "FP32": "TYPE_FP32", "INT64": "TYPE_INT64", "INT8": "TYPE_INT8"}
_WORKSPACE_BYTES = 1 << 30
FOLDER = "warmup"
CPU_ROWS = (1, 64)
GPU_ROWS = (1, 8, 64, 256)  # libraries choose their kernels by the size at its first use


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The common settings of every model of a release. `gpus`: ids as the process sees them; none: the CPU.

    `gpu_bytes`: what ONNX Runtime may use on each.
    """

    release: Release
    serving: ServingSpec
    threads: int = 1
    gpus: tuple[int, ...] = ()
    gpu_bytes: int | None = None
    engines: Path | None = None  # where TensorRT stores engines built at the first start
    golden: Golden | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    def of_front(self) -> Settings:
        """Returns the settings of the front: strings and features stay on the CPU."""
        return replace(self, gpus=(), gpu_bytes=None)

    def of_core(self) -> Settings:
        """Returns the settings of the core: its rows come from the front, so there are no golden ones."""
        return replace(self, golden=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """The text of a configuration, and the files that it names beside it."""

    text: str
    files: dict[str, bytes] = field(default_factory=dict)


def python_config(
    schema: Schema, settings: Settings, *, name: str | None = None, graphs: Sequence[str] = ("model.onnx",)
) -> Configured:
    """Returns the configuration of triton_models/onnx_python/1/model.py. `graphs`: one, or a front and its core."""
    config = _begun("onnx_python", schema.inputs, schema.outputs, settings, name)
    accelerator = settings.serving.accelerator if settings.gpus else "cpu"
    words = {
        "graphs": " ".join(graphs),
        "ort_threads": str(settings.threads),
        "provider": accelerator,
        "max_string_bytes": str(settings.serving.max_string),
    }
    if settings.gpus and settings.gpu_bytes:
        words["gpu_mem_limit"] = str(settings.gpu_bytes)
    for key, value in words.items():
        config.parameters[key].string_value = value
    return _finished(config, schema.inputs, settings)


def native_config(schema: Schema, settings: Settings) -> Configured:
    """Returns the configuration of Serin's ONNX backend (serin/serving/native/onnx_backend.py)."""
    config = _begun("onnx_native", schema.inputs, schema.outputs, settings)
    return _finished(config, schema.inputs, settings)


def onnxruntime_config(schema: Schema, settings: Settings, *, name: str | None = None) -> Configured:
    """Returns the configuration of Triton's own ONNX Runtime backend."""
    config = _begun("onnxruntime", schema.inputs, schema.outputs, settings, name)
    config.parameters["intra_op_thread_count"].string_value = str(settings.threads)
    config.parameters["inter_op_thread_count"].string_value = "1"
    if settings.gpus:
        _add_accelerator(config, schema.inputs, settings)
    return _finished(config, schema.inputs, settings)


def plan_config(schema: Schema, settings: Settings, *, name: str) -> Configured:
    """Returns the configuration of a TensorRT engine with all of its profiles: each is fastest at its own batch
    sizes."""
    config = _begun("tensorrt_plan", schema.inputs, schema.outputs, settings, name)
    profiles = {*PLAN_PROFILE_ROWS, settings.serving.max_batch_rows}
    config.instance_group[0].profile.extend(str(number) for number in range(len(profiles)))
    return _finished(config, schema.inputs, settings)


def fil_config(columns: int, settings: Settings, *, name: str) -> Configured:
    """Returns the configuration of XGBoost's trees. FIL requires these names."""
    row = InputColumn(name="input__0", dtype="FP32", kind="float", null="NaN", dims=(columns,))
    scores = OutputTensor(name="output__0", dtype="FP32", dims=(1,))
    config = _begun("fil", (row,), (scores,), settings, name)
    return _finished(config, (row,), settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A model inside an ensemble, with the mapping of its tensors to the ensemble's."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def ensemble_config(schema: Schema, settings: Settings, steps: Sequence[Step]) -> Configured:
    """Returns the configuration of the model that clients call. Instances, batcher and warm-up belong to its parts."""
    config = _begun("ensemble", schema.inputs, schema.outputs, settings)
    for step in steps:
        added = config.ensemble_scheduling.step.add(
            model_name=step.model, model_version=settings.release.version
        )
        for theirs, ours in step.inputs.items():
            added.input_map[theirs] = ours
        for theirs, ours in step.outputs.items():
            added.output_map[theirs] = ours
    return Configured(text=str(text_format.MessageToString(config)))


def _begun(
    backend: str,
    inputs: Sequence[InputColumn],
    outputs: Sequence[OutputTensor],
    settings: Settings,
    name: str | None = None,
) -> Any:
    template = (BACKENDS / backend / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(template, model_config_pb2.ModelConfig())
    config.name = settings.release.model if name is None else name
    config.max_batch_size = settings.serving.max_batch_rows
    config.version_policy.specific.versions.append(settings.release.version)
    config.metric_tags["release"] = settings.release.name
    for key, value in settings.tags.items():
        config.metric_tags[key] = value
    if config.HasField("dynamic_batching") and settings.serving.queue_delay:
        config.dynamic_batching.max_queue_delay_microseconds = round(settings.serving.queue_delay * 1e6)
    for column in inputs:
        config.input.add(name=column.name, data_type=_TYPES[column.dtype], dims=column.dims)
    for output in outputs:
        config.output.add(name=output.name, data_type=_TYPES[output.dtype], dims=output.dims)
    if backend != "ensemble":
        kind = "KIND_GPU" if settings.gpus else "KIND_CPU"
        config.instance_group.add(kind=kind, count=settings.serving.instances, gpus=settings.gpus)
    return config


def _add_accelerator(config: Any, inputs: Sequence[InputColumn], settings: Settings) -> None:
    if settings.serving.accelerator == "tensorrt":
        most = settings.serving.max_batch_rows
        options = {
            "precision_mode": "FP32",  # no permission to round: precision comes from the graph
            "max_workspace_size_bytes": str(_WORKSPACE_BYTES),
        }
        if all(column.dtype != "BYTES" for column in inputs):  # else TensorRT's part begins behind them
            for key, rows in (("min", 1), ("opt", min(64, most)), ("max", most)):
                options[f"trt_profile_{key}_shapes"] = _shapes(inputs, rows)
        if settings.engines:
            options |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(settings.engines)}
    else:
        options = {"gpu_mem_limit": str(settings.gpu_bytes)} if settings.gpu_bytes else {}
    accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator.add(
        name=settings.serving.accelerator
    )
    for key, value in options.items():
        accelerator.parameters[key] = value


def _shapes(inputs: Sequence[InputColumn], rows: int) -> str:
    return ",".join(f"{column.name}:{'x'.join(map(str, (rows, *column.dims)))}" for column in inputs)


def _finished(config: Any, inputs: Sequence[InputColumn], settings: Settings) -> Configured:
    files = add_warm_up(config, inputs, GPU_ROWS if settings.gpus else CPU_ROWS, settings.golden)
    return Configured(text=str(text_format.MessageToString(config)), files=files)


# Triton reads the value of each input for one row from a file, `<model>/warmup/<name>`, and repeats it to fill the
# batch.
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
            tensor.data_type = model_config_pb2.DataType.Value(_TYPES[column.dtype])
            tensor.dims.extend(column.dims)
            if golden is None or not len(golden):
                tensor.zero_data = True
                continue
            name = f"{number}-{position}.bin"  # a column may have any name, a file may not
            files[f"{FOLDER}/{name}"] = tensor_bytes(
                np.asarray(golden.inputs[column.name][number % len(golden)]), column.dtype
            )
            tensor.input_data_file = name
    return files
