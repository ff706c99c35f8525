"""Runs a user's ONNX graph in this process: any error there is reported as the graph's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from serin.errors import ModelUnfit
from serin.formats.shards import Array

_QUIET = 3
_ERRORS: tuple[type[BaseException], ...] = (  # ONNX Runtime's errors have no common base but Exception
    ValueError,
    *(kind for kind in vars(ort_state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)


class RunningGraph:
    def __init__(self, model: onnx.ModelProto, what: str) -> None:
        self._what = what
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _QUIET
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session: Any = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except _ERRORS as error:
            raise ModelUnfit(what=what, reason=f"ONNX Runtime cannot load it: {_short(error)}") from error

    def ask(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        try:
            found: list[Array] = self._session.run(list(outputs), dict(inputs))
        except _ERRORS as error:
            raise ModelUnfit(
                what=self._what, reason=f"ONNX Runtime cannot run it: {_short(error)}"
            ) from error
        return found


def _short(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300]
