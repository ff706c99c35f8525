"""Builds a TensorRT engine from a network, with TensorRT's Python API or ONNX Runtime's provider for it.

Needs a GPU and TensorRT's libraries. An engine is valid for one kind of GPU, one TensorRT and one driver: the key
identifies them, and another machine builds its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import onnx

from serin.export.convert.typed_engine import build_engine
from serin.machine.hardware import inventory
from serin.scoring.session import has_device

PROFILE_ROWS = (1, 8, 64)
_WORKSPACE_BYTES = 1 << 30
_WHAT = "the network as a TensorRT engine"


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
    device = inventory()[0]
    key = engine_key(device.name, driver_version(), core)
    kept = cache / f"{key}.plan"
    if not kept.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        plan = build_plan(core, max_rows=max_rows, timing_cache=cache / "timings")
        scratch = kept.with_suffix(".new")
        scratch.write_bytes(plan)
        scratch.replace(kept)
    return kept.read_bytes(), key


def driver_version() -> str:
    """Returns the version of the NVIDIA driver; empty if unknown."""
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0] if path.is_file() else ""


def engine_key(gpu: str, driver: str, network: onnx.ModelProto) -> str:
    """Returns a key that is equal when an earlier engine may be used: same GPU, TensorRT, driver and network."""
    import tensorrt

    parts = (gpu, driver, str(tensorrt.__version__))
    digest = hashlib.sha256(network.SerializeToString(deterministic=True)).hexdigest()
    return hashlib.sha256("\n".join((*parts, digest)).encode()).hexdigest()


def provider_options(columns: dict[str, int], max_rows: int) -> dict[str, Any]:
    """Returns options that make ONNX Runtime's TensorRT provider build like `build_plan`. `columns`: input name ->
    width. Without `trt_fp16_enable` the provider builds strongly typed engines: precision comes from the graph."""

    def shapes(rows: int) -> str:
        return ",".join(f"{name}:{rows}x{width}" for name, width in columns.items())

    return {
        "trt_timing_cache_enable": True,
        "trt_profile_min_shapes": shapes(1),
        "trt_profile_opt_shapes": shapes(64),
        "trt_profile_max_shapes": shapes(max_rows),
    }


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
