"""Stands in for triton_python_backend_utils, which exists only inside Triton's own process."""

import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serin.formats.wire import Array
from serin.serving.triton.model_config import MODEL_CODE


@dataclass
class Tensor:
    _name: str
    values: Array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self.values


class TritonError(Exception):
    INTERNAL, INVALID_ARG = 1, 3

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message, self.code = message, code


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None


class Logger:
    lines: list[str] = []  # noqa: RUF012 (Triton's is one for the process, too)

    @classmethod
    def log_error(cls, line: str) -> None:
        cls.lines.append(line)

    log_warn = log_error


@dataclass
class InferenceRequest:
    """Strings arrive as bytes, as they do in Triton."""

    columns: dict[str, Array]
    given: str = "{}"  # parameters, as JSON
    id: str = ""

    def parameters(self) -> str:
        return self.given

    def request_id(self) -> str:
        return self.id

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, _as_bytes(values)) for name, values in self.columns.items()]


def _as_bytes(values: Array) -> Array:
    if values.dtype != object:
        return values
    encoded = [value.encode() if isinstance(value, str) else value for value in values.reshape(-1)]
    return np.array(encoded, dtype=object).reshape(values.shape)


def load_model(folder: Path, version: int) -> Any:
    """The model that Triton would run from the model's `folder`, with what its configuration says, initialised."""
    fake = ModuleType("triton_python_backend_utils")
    for part in (Tensor, TritonError, InferenceResponse, Logger):
        setattr(fake, part.__name__, part)
    sys.modules["triton_python_backend_utils"] = fake
    try:
        spec = importlib.util.spec_from_file_location("served_model", MODEL_CODE)
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        del sys.modules["triton_python_backend_utils"]
    model = module.TritonPythonModel()
    text = (folder / "config.pbtxt").read_text(encoding="utf-8")
    said = text_format.Parse(text, model_config_pb2.ModelConfig()).parameters
    parameters = {key: {"string_value": value.string_value} for key, value in said.items()}
    model.initialize(
        {
            "model_repository": str(folder),
            "model_version": str(version),
            "model_config": json.dumps({"parameters": parameters}),
        }
    )
    return model
