"""ONNX Runtime sessions, all opened in one way: on the CPU, quiet, and with this project's errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from serin.errors import ExportFailed
from serin.formats.wire import Array

_ERROR = 3  # ONNX Runtime's log levels: 0 verbose .. 4 fatal
RUNTIME_ERRORS: tuple[type[BaseException], ...] = tuple(  # they share no base but Exception
    getattr(ort_errors, name)
    for name in ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoSuchFile", "NotImplemented",
                 "RuntimeException", "EPFail", "NoModel", "EngineError", "ModelLoaded")
    if hasattr(ort_errors, name)
)  # fmt: skip


def open_session(model: onnx.ModelProto | Path, *, threads: int | None = None) -> ort.InferenceSession:
    """A session for a graph in memory or in a file. `threads`: None leaves it to ONNX Runtime (one per core)."""
    options = ort.SessionOptions()
    options.log_severity_level = _ERROR
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # others need the cores too
    if threads is not None:
        options.intra_op_num_threads = threads
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except RUNTIME_ERRORS as error:
        raise ExportFailed(what="the graph", reason=f"ONNX Runtime does not load it: {error}") from error


def run_in_batches(
    session: ort.InferenceSession, inputs: Mapping[str, Array], outputs: Sequence[str], batch_rows: int
) -> dict[str, Array]:
    """The outputs for all rows, `batch_rows` at a time; also for no rows at all."""
    rows = len(next(iter(inputs.values())))
    parts = [
        session.run(list(outputs), {name: values[at : at + batch_rows] for name, values in inputs.items()})
        for at in range(0, max(rows, 1), batch_rows)
    ]
    return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(outputs)}
