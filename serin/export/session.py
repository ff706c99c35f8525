"""Opens ONNX Runtime sessions in one way: quiet, without spinning threads, and with Serin's errors.

A model runs whole in one session, or as a front on the CPU (strings, lookups, features) with a core on an accelerator;
both have the same interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from serin.errors import ExportFailed
from serin.export import plugin_provider
from serin.formats.wire import Array

Device = Literal["cpu", "cuda", "tensorrt", "tensorrt_rtx"]

_ERROR = 3  # ONNX Runtime's log levels: 0 verbose .. 4 fatal
_PROVIDERS: Mapping[Device, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "tensorrt_rtx": plugin_provider.PROVIDER,
}
RUNTIME_ERRORS: tuple[type[BaseException], ...] = tuple(  # they have no common base but Exception
    getattr(ort_errors, name)
    for name in ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoSuchFile", "NotImplemented",
                 "RuntimeException", "EPFail", "NoModel", "EngineError", "ModelLoaded")
    if hasattr(ort_errors, name)
)  # fmt: skip


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
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    wanted = _PROVIDERS[device]
    if device == "tensorrt_rtx":
        return _open_with_plugin(source, settings, options)
    if wanted not in ort.get_available_providers():
        raise ExportFailed(what="the graph", reason=f"this ONNX Runtime has no {wanted}")
    providers: list[Any] = [(wanted, dict(options or {}))]
    if device != "cpu":
        providers.append(_PROVIDERS["cpu"])
    try:
        session = ort.InferenceSession(source, settings, providers=providers)
    except RUNTIME_ERRORS as error:
        raise ExportFailed(what="the graph", reason=f"ONNX Runtime cannot load it: {error}") from error
    if wanted not in session.get_providers():
        raise ExportFailed(
            what="the graph", reason=f"{wanted} does not start here; its libraries are missing"
        )
    return session


def _open_with_plugin(
    source: str | bytes, settings: ort.SessionOptions, options: Mapping[str, Any] | None
) -> ort.InferenceSession:
    refusal = plugin_provider.add_provider(settings, options)
    if refusal:
        raise ExportFailed(what="the graph", reason=refusal)
    try:
        return ort.InferenceSession(source, settings)
    except RUNTIME_ERRORS as error:
        raise ExportFailed(what="the graph", reason=f"ONNX Runtime cannot load it: {error}") from error


def has_device(device: Device) -> bool:
    """Returns whether this ONNX Runtime has a provider for the device; it may still fail to start."""
    if device == "tensorrt_rtx":
        return not plugin_provider.provider_refusal()
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
