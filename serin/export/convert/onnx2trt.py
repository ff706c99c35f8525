"""Builds engines of TensorRT from a network.

Engines are strongly typed: precision comes from the graph alone, and the exporter's fp16 graph already keeps in fp32
what needs it. An engine needs a GPU, and is valid for one kind of GPU, one TensorRT and one driver: the key identifies
them, and another machine builds its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from serin.errors import ExportFailed
from serin.machine.durable import replacing
from serin.machine.hardware import inventory
from serin.scoring.session import Device, has_device

PROFILE_ROWS = (1, 8, 64)
_OPTIMAL_ROWS = 64
_WORKSPACE_BYTES = 1 << 30
_WHAT = "the network as a TensorRT engine"
_PLACE = re.compile(r" ?In \w+ at /_src/[^\s):]*:\d+")  # in the library's own sources
_NO_DRIVER = "catchCudaError"


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
    if device != "tensorrt":
        return {}
    sizes = {"min": 1, "opt": min(_OPTIMAL_ROWS, max_rows), "max": max_rows}
    shapes = {
        f"trt_profile_{name}_shapes": ",".join(
            f"{column}:{rows}x{width}" for column, width in columns.items()
        )
        for name, rows in sizes.items()
    }
    return {"trt_timing_cache_enable": True, **shapes}


def build_plan(graph: onnx.ModelProto, *, max_rows: int, timing_cache: Path) -> bytes:
    """Returns a serialised, strongly typed engine with one profile for each of 1, 8, 64 and `max_rows` rows.

    Raises ExportFailed with the node that cannot be converted.
    """
    import tensorrt

    lines: list[str] = []
    collector = collecting_logger(tensorrt, lines)
    builder = tensorrt.Builder(collector)
    typed = getattr(
        tensorrt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None
    )  # where it is not the only way
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = tensorrt.OnnxParser(network, collector)
    if not parser.parse(graph.SerializeToString()):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        raise ExportFailed(what=_WHAT, reason="; ".join(_describe(error) for error in errors) or "not parsed")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(tensorrt.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
    known = timing_cache.read_bytes() if timing_cache.is_file() else b""
    config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
    for profile in _profiles(builder, network, (*PROFILE_ROWS, max_rows)):
        config.add_optimization_profile(profile)
    lines.clear()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        reason = (
            "; ".join(_cleaned(line) for line in lines if "Error" in line) or "the builder gave no reason"
        )
        raise ExportFailed(what=_WHAT, reason=reason)
    timing_cache.write_bytes(bytes(config.get_timing_cache().serialize()))
    return bytes(plan)


def collecting_logger(api: Any, lines: list[str]) -> Any:
    """Returns a logger that appends to `lines`. `api`: the module tensorrt, which has no types and may be absent."""

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
