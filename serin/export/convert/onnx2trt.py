"""Builds engines of TensorRT and of TensorRT for RTX from a network, with the Python API that both share.

Engines are strongly typed: precision comes from the graph alone, and the exporter's fp16 graph already keeps in fp32
what needs it. An engine of TensorRT needs a GPU, and is valid for one kind of GPU, one TensorRT and one driver: the key
identifies them, and another machine builds its own. Engines of TensorRT for RTX (the extra `tensorrt`) are made for
compute capabilities that are named, so any machine can prove that a network converts; only GPUs of `supports` run them.
They are experimental: such a variant is measured where a GPU supports it, and never served.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from serin.errors import ExportFailed
from serin.machine.durable import replacing
from serin.machine.hardware import Nvml, inventory
from serin.scoring.session import Device, has_device, provider_refusal

logger = logging.getLogger(__name__)

PROFILE_ROWS = (1, 8, 64)
BUILT_FOR = ("8.0", "8.9")  # A100 and L4: engines for both, wherever they are built
RUNS_ON = "8.0, 8.6, 8.9 and 12.x"
_NAMES = ("8.0", "8.6", "8.9")
_FIRST_ANY_MINOR = 12
_OPTIMAL_ROWS = 64
_LIBRARIES = ("libtensorrt_rtx.so.1", "libtensorrt_onnxparser_rtx.so.1")  # the second needs the first
_RTX_WHAT = "the network as an engine of TensorRT for RTX"
_NOT_INSTALLED = "TensorRT for RTX is not installed: pip install 'serin[tensorrt]'"
_WORKSPACE_BYTES = 1 << 30
_WHAT = "the network as a TensorRT engine"
_COMPILED = re.compile(r"^Name: [^,]+, LayerType: [^,]+,.*?(Outputs: .*)$", re.MULTILINE)
_OUTPUT_TYPE = re.compile(r"Datatype: (\w+)")
_PLACE = re.compile(r" ?In \w+ at /_src/[^\s):]*:\d+")  # in the library's own sources
_NO_DRIVER = "catchCudaError"

Api = Any  # the module tensorrt or tensorrt_rtx_bindings: neither has types, and both may be absent


def missing_tensorrt() -> str:
    """Returns why no engine can be built and judged here; empty when one can."""
    if not has_device("tensorrt"):
        return "TensorRT is not available: ONNX Runtime has no provider for it"
    return ""


def engine_of(core: onnx.ModelProto, *, max_rows: int, cache: Path) -> tuple[bytes, str] | None:
    """Returns an engine for Triton's TensorRT backend and its key; None without TensorRT's Python package.

    An engine that was built before with the same key is taken from `cache`.
    """
    if importlib.util.find_spec("tensorrt") is None:
        return None
    key = _engine_key(core)
    kept = cache / f"{key}.plan"
    if not kept.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        plan = build_plan(core, max_rows=max_rows, timing_cache=cache / "timings")
        with replacing(kept) as scratch:
            scratch.write_bytes(plan)
    return kept.read_bytes(), key


def _engine_key(network: onnx.ModelProto) -> str:
    """Returns a key that is equal when an earlier engine may be used: same GPU, TensorRT, driver and network."""
    import tensorrt

    driver = Path("/proc/driver/nvidia/version")
    digest = hashlib.sha256(network.SerializeToString(deterministic=True)).hexdigest()
    parts = (
        inventory()[0].name,
        driver.read_text().splitlines()[0] if driver.is_file() else "",
        str(tensorrt.__version__),
        digest,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def provider_options(device: Device, columns: Mapping[str, int], max_rows: int) -> dict[str, Any]:
    """Returns options with which ONNX Runtime's provider builds engines for 1 to `max_rows` rows; none for a device
    without engines. `columns`: input name -> width. Without `trt_fp16_enable` TensorRT's provider builds strongly typed
    engines, like `build_plan`: precision comes from the graph."""
    if device not in ("tensorrt", "tensorrt_rtx"):
        return {}
    prefix = "trt" if device == "tensorrt" else "nv"
    sizes = {"min": 1, "opt": min(_OPTIMAL_ROWS, max_rows), "max": max_rows}
    shapes = {
        f"{prefix}_profile_{name}_shapes": ",".join(
            f"{column}:{rows}x{width}" for column, width in columns.items()
        )
        for name, rows in sizes.items()
    }
    return {"trt_timing_cache_enable": True, **shapes} if device == "tensorrt" else shapes


def build_plan(network: onnx.ModelProto, *, max_rows: int, timing_cache: Path) -> bytes:
    """Returns a serialised, strongly typed engine with one profile for each of 1, 8, 64 and `max_rows` rows."""
    import tensorrt

    def configure(config: Any) -> None:
        config.set_memory_pool_limit(tensorrt.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
        known = timing_cache.read_bytes() if timing_cache.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
        configs.append(config)

    configs: list[Any] = []
    sizes = (*PROFILE_ROWS, max_rows)
    engine = build_engine(tensorrt, network, sizes=sizes, what=_WHAT, configure=configure)
    timing_cache.write_bytes(bytes(configs[0].get_timing_cache().serialize()))
    return engine.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A serialised engine. `precisions`: the type of each layer's first output; empty for a layer without one."""

    plan: bytes
    precisions: tuple[str, ...]


def build_engine(
    api: Api,
    graph: onnx.ModelProto,
    *,
    sizes: Sequence[int],
    what: str,
    configure: Callable[[Any], None] | None = None,
) -> Engine:
    """Returns an engine with one profile for each number of rows in `sizes`.

    Raises ExportFailed with the node that cannot be converted. `what` names the engine in it; `configure` may set more
    of the builder's configuration.
    """
    lines: list[str] = []
    collector = _collecting_logger(api, lines)
    builder = api.Builder(collector)
    typed = getattr(api.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # where it is not the only way
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = api.OnnxParser(network, collector)
    if not parser.parse(graph.SerializeToString()):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        raise ExportFailed(what=what, reason="; ".join(_describe(error) for error in errors) or "not parsed")
    config = builder.create_builder_config()
    config.profiling_verbosity = api.ProfilingVerbosity.DETAILED
    if configure is not None:
        configure(config)
    for profile in _profiles(builder, network, sizes):
        config.add_optimization_profile(profile)
    lines.clear()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        reason = (
            "; ".join(_cleaned(line) for line in lines if "Error" in line) or "the builder gave no reason"
        )
        raise ExportFailed(what=what, reason=reason)
    return Engine(plan=bytes(plan), precisions=_precisions(lines))


def _collecting_logger(api: Api, lines: list[str]) -> Any:
    class Collecting(api.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            api.ILogger.__init__(self)

        def log(self, _severity: Any, text: str) -> None:
            lines.append(text)

    return Collecting()


def _describe(error: Any) -> str:
    """Returns a parser's error in one line, with the node first."""
    node, operator = error.node_name(), error.node_operator()
    place = f"node {node!r} ({operator}): " if node else ""
    text = [line for line in error.desc().splitlines() if line and _NO_DRIVER not in line]
    told = [line for line in text if not line.startswith("Invalid Node")] or text
    plain = _cleaned("; ".join(told))
    return f"{place}{plain if plain not in ('', 'false') else 'the operator is not supported'}"


def _cleaned(text: str) -> str:
    return _PLACE.sub("", text.replace("\n", "; ")).strip()


def _precisions(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the types from the builder's report: an engine cannot be opened without a GPU."""
    report = next((line for line in lines if line.startswith("Layers:")), "")
    layers = _COMPILED.findall(report.partition("\n")[2])
    return tuple(next(iter(_OUTPUT_TYPE.findall(outputs)), "").upper() for outputs in layers)


def _profiles(builder: Any, network: Any, sizes: Sequence[int]) -> list[Any]:
    """Returns one profile per size, from the size before it: an engine is fastest at the shape it was tuned for."""
    profiles, least = [], 1
    for rows in sorted(set(sizes)):
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            width = tensor.shape[1]
            profile.set_shape(tensor.name, (least, width), (rows, width), (rows, width))
        profiles.append(profile)
        least = rows
    return profiles


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
    found = capabilities
    if found is None:
        nvml = Nvml.open()
        each = {device.name: nvml.compute_capability(device.id) if nvml else None for device in inventory()}
        found = {name: capability for name, capability in each.items() if capability is not None}
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
                    what=_RTX_WHAT, reason=f"it cannot be built for compute capability {capability}"
                )

    sizes = sorted({min(_OPTIMAL_ROWS, max_rows), max_rows})
    return build_engine(api, graph, sizes=sizes, what=_RTX_WHAT, configure=configure)


def _load_api() -> Api:
    """Returns the bindings, which find the libraries only when those are loaded already."""
    if not is_installed():
        raise ExportFailed(what=_RTX_WHAT, reason=_NOT_INSTALLED)
    import tensorrt_rtx_libs

    folder = Path(next(iter(tensorrt_rtx_libs.__path__)))
    for name in _LIBRARIES:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    import tensorrt_rtx_bindings

    return tensorrt_rtx_bindings


def _summary(engine: Engine) -> str:
    counts = Counter(filter(None, engine.precisions))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return f"{len(engine.precisions)} layers: {kinds}; {len(engine.plan):,} bytes"
