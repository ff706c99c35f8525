"""Registers TensorRT for RTX with ONNX Runtime: a provider in a package beside it, which finds its own devices."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

PROVIDER = "NvTensorRTRTXExecutionProvider"
_PACKAGE = "onnxruntime_ep_nv_tensorrt_rtx"


def provider_refusal() -> str:
    """Returns why ONNX Runtime cannot use TensorRT for RTX here; empty when it can."""
    refusal = _register()
    if refusal:
        return refusal
    return "" if _devices() else f"{PROVIDER} finds no device that it supports"


def add_provider(settings: ort.SessionOptions, options: Mapping[str, Any] | None) -> str:
    """Adds the provider with its first device to a session's settings. Returns why not; empty when it was added."""
    refusal = provider_refusal()
    if not refusal:
        settings.add_provider_for_devices(
            _devices()[:1], {key: str(value) for key, value in (options or {}).items()}
        )
    return refusal


def profile_options(columns: Mapping[str, int], max_rows: int) -> dict[str, str]:
    """Returns the provider's options for 1 to `max_rows` rows. `columns`: input name -> width."""

    def shapes(rows: int) -> str:
        return ",".join(f"{name}:{rows}x{width}" for name, width in columns.items())

    return {
        "nv_profile_min_shapes": shapes(1),
        "nv_profile_opt_shapes": shapes(min(64, max_rows)),
        "nv_profile_max_shapes": shapes(max_rows),
    }


@cache
def _register() -> str:
    """Loads the plugin once in a process: ONNX Runtime refuses a second time."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return f"ONNX Runtime has no {PROVIDER}: pip install 'serin[tensorrt]'"
    import onnxruntime_ep_nv_tensorrt_rtx as plugin

    try:
        ort.register_execution_provider_library(_PACKAGE, plugin.get_library_path())
    except (ort_errors.Fail, ort_errors.RuntimeException, ort_errors.InvalidArgument) as error:
        return f"{PROVIDER} does not load: {str(error).rpartition('with error: ')[2]}"
    return ""


def _devices() -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
