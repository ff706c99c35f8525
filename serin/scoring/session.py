"""Opens ONNX Runtime sessions in one way: quiet, without spinning threads, and with Serin's errors.

A model runs whole in one session, or as a front on the CPU (strings, lookups, features) with a core on an accelerator;
both have the same interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from serin.errors import ExportFailed
from serin.formats.external_data import for_runtime
from serin.formats.wire import Array

Device = Literal["cpu", "cuda", "tensorrt"]

_ERROR = 3  # ONNX Runtime's log levels: 0 verbose .. 4 fatal
_PROVIDERS: Mapping[Device, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
RUNTIME_ERRORS: tuple[type[BaseException], ...] = tuple(  # they have no common base but Exception
    kind for kind in vars(ort_errors).values() if isinstance(kind, type) and issubclass(kind, Exception)
)


class Runs(Protocol):
    """An ONNX Runtime session, or a front and a core that act as one."""

    def run(self, outputs: Sequence[str], feed: Mapping[str, Array]) -> list[Array]: ...


def open_session(
    model: onnx.ModelProto | Path,
    *,
    threads: int | None = None,
    device: Device = "cpu",
    options: Mapping[str, Any] | None = None,
) -> ort.InferenceSession:
    """Opens a session for a graph in memory or in a file. `threads`: None leaves it to ONNX Runtime (one per core).

    Nodes that the device's provider cannot run go to the CPU; a provider that is not available raises ExportFailed.
    """
    settings = ort.SessionOptions()
    settings.log_severity_level = _ERROR
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # others need the cores too
    if threads is not None:
        settings.intra_op_num_threads = threads
    source, folder = (str(model), None) if isinstance(model, Path) else for_runtime(model)
    if folder is not None:
        settings.add_session_config_entry(_DATA_FOLDER, str(folder))
    wanted = _PROVIDERS[device]
    if not has_device(device):
        raise ExportFailed(what="the graph", reason=f"this ONNX Runtime has no {wanted}")
    providers = [(wanted, dict(options or {})), *([_PROVIDERS["cpu"]] if device != "cpu" else [])]
    try:
        session = ort.InferenceSession(source, settings, providers=providers)
    except RUNTIME_ERRORS as error:
        raise ExportFailed(what="the graph", reason=f"ONNX Runtime cannot load it: {error}") from error
    if wanted not in session.get_providers():
        raise ExportFailed(
            what="the graph", reason=f"{wanted} does not start here; its libraries are missing"
        )
    return session


def has_device(device: Device) -> bool:
    """Returns whether this ONNX Runtime has a provider for the device; it may still fail to start."""
    return _PROVIDERS[device] in ort.get_available_providers()


class FrontAndCore:
    """Two sessions as one model: the front's outputs are the core's inputs, by name."""

    def __init__(self, front: ort.InferenceSession, core: ort.InferenceSession) -> None:
        self._front = front
        self._core = core
        self._between = [tensor.name for tensor in core.get_inputs()]

    def run(self, outputs: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        between = self._front.run(self._between, dict(feed))
        answer: list[Array] = self._core.run(list(outputs), dict(zip(self._between, between, strict=True)))
        return answer


def run_in_batches(
    session: Runs, inputs: Mapping[str, Array], outputs: Sequence[str], batch_rows: int
) -> dict[str, Array]:
    """Returns the outputs for all rows, computed `batch_rows` at a time; also for no rows at all."""
    rows = len(next(iter(inputs.values())))
    parts = [
        session.run(list(outputs), {name: values[at : at + batch_rows] for name, values in inputs.items()})
        for at in range(0, max(rows, 1), batch_rows)
    ]
    return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(outputs)}


@contextmanager
def with_tensors(model: onnx.ModelProto, tensors: Sequence[str]) -> Iterator[onnx.ModelProto]:
    """Within the block `model` also outputs intermediate tensors."""
    outputs = model.graph.output
    present = {output.name for output in outputs}
    outputs.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in present)
    try:
        yield model
    finally:
        del outputs[len(present) :]


def float_tensors(model: onnx.ModelProto) -> list[str]:
    """Returns the float32 tensors that nodes output, in the order of the nodes."""
    inferred = onnx.shape_inference.infer_shapes(model)
    known = {
        info.name: info.type.tensor_type.elem_type
        for info in (*inferred.graph.value_info, *inferred.graph.output)
    }
    names = [name for node in model.graph.node for name in node.output if name]
    return [name for name in names if known.get(name) == onnx.TensorProto.FLOAT]


def run_with_inner(
    model: onnx.ModelProto, feed: Mapping[str, Array], tensors: Sequence[str]
) -> dict[str, Array]:
    """Returns the intermediate tensors by name, for one batch."""
    with with_tensors(model, tensors):
        session = open_session(model)
    return dict(zip(tensors, session.run(list(tensors), dict(feed)), strict=True))
