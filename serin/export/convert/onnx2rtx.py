"""Builds a network with TensorRT for RTX, ahead of time and without a GPU, and decides whether it can run here.

Its libraries come from PyPI (the extra `tensorrt`). Engines are made for compute capabilities that are named, so any
machine can prove that a network converts; only GPUs of `supports` run them. It is experimental: such a variant is
measured where a GPU supports it, and never served.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from serin.errors import ExportFailed
from serin.export.convert.typed_engine import Api, Engine, build_engine, load_refusal
from serin.machine.hardware import Device, Nvml, inventory
from serin.scoring.session import provider_refusal

logger = logging.getLogger(__name__)

BUILT_FOR = ("8.0", "8.9")  # A100 and L4: engines for both, wherever they are built
RUNS_ON = "8.0, 8.6, 8.9 and 12.x"
_NAMES = ("8.0", "8.6", "8.9")
_FIRST_ANY_MINOR = 12
_OPTIMAL_ROWS = 64
_LIBRARIES = ("libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1")  # the second needs the first
_WHAT = "the network as an engine of TensorRT for RTX"
_NOT_INSTALLED = "TensorRT for RTX is not installed: pip install 'serin[tensorrt]'"


def supports(capability: str) -> bool:
    """Returns whether TensorRT for RTX runs on GPUs of a compute capability such as "8.9"."""
    return capability in _NAMES or int(capability.partition(".")[0]) >= _FIRST_ANY_MINOR


def rtx_reason(graph: onnx.ModelProto, *, max_rows: int) -> str:
    """Returns why the graph cannot be measured with TensorRT for RTX here; empty when it can.

    Where the libraries are installed, engines are built and inspected first: a graph that they refuse is refused with
    its node's name on every machine.
    """
    refusal = gpu_refusal()
    if not is_installed():
        return refusal or _NOT_INSTALLED
    try:
        engine = build_rtx_engine(graph, max_rows=max_rows)
    except ExportFailed as error:
        return str(error.fields["reason"])
    built = f"built for compute capability {' and '.join(BUILT_FOR)} ({_summary(engine)}), not executed"
    logger.info(f"TensorRT for RTX: {built.removesuffix(', not executed')}")
    refusal = refusal or provider_refusal()
    return f"{built}: {refusal}" if refusal else ""


def gpu_refusal(capabilities: Mapping[str, str] | None = None) -> str:
    """Returns why no GPU of this machine runs such engines, by name; empty when one does. `capabilities`: of each
    GPU's name, instead of the driver's answer."""
    found = _capabilities(inventory()) if capabilities is None else capabilities
    if not found:
        return "there is no GPU here"
    if any(supports(capability) for capability in found.values()):
        return ""
    named = "; ".join(f"{name} has compute capability {capability}" for name, capability in found.items())
    return f"{named}, and TensorRT for RTX runs on {RUNS_ON}"


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("tensorrt_rtx_libs", "tensorrt_rtx_bindings"))


def build_rtx_engine(
    graph: onnx.ModelProto, *, max_rows: int, capabilities: Sequence[str] = BUILT_FOR
) -> Engine:
    """Returns one engine for all of `capabilities`. Raises ExportFailed with the node that it refuses."""
    api = _load_api()

    def configure(config: object) -> None:
        config.num_compute_capabilities = len(capabilities)  # type: ignore[attr-defined]
        for index, capability in enumerate(capabilities):
            value = getattr(api.ComputeCapability, f"SM{capability.replace('.', '')}", None)
            if value is None or not config.set_compute_capability(value, index):  # type: ignore[attr-defined]
                raise ExportFailed(
                    what=_WHAT, reason=f"it cannot be built for compute capability {capability}"
                )

    sizes = sorted({min(_OPTIMAL_ROWS, max_rows), max_rows})
    return build_engine(api, graph, sizes=sizes, what=_WHAT, configure=configure)


def runtime_refusal(plan: bytes) -> str:
    """Returns why the runtime does not load an engine here, in its own words; empty when it does."""
    return load_refusal(_load_api(), plan)


def _load_api() -> Api:
    """Returns the bindings, which find the libraries only when those are loaded already."""
    if not is_installed():
        raise ExportFailed(what=_WHAT, reason=_NOT_INSTALLED)
    import tensorrt_rtx_libs

    folder = Path(next(iter(tensorrt_rtx_libs.__path__)))
    for name in _LIBRARIES:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    import tensorrt_rtx_bindings

    return tensorrt_rtx_bindings


def _capabilities(devices: Sequence[Device]) -> dict[str, str]:
    nvml = Nvml.open()
    found = {device.name: nvml.compute_capability(device.id) if nvml else None for device in devices}
    return {name: capability for name, capability in found.items() if capability is not None}


def _summary(engine: Engine) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(engine.precisions().items()))
    return f"{len(engine.compiled)} layers: {kinds}; {len(engine.plan):,} bytes"
