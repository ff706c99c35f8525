"""The versions under which a result was seen: driver, CUDA, and the packages of both environments."""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from serin.errors import TritonMissing
from serin.machine.hardware import inventory
from serin.serving.triton.installation import find_triton

PACKAGES = {
    "torch": ("torch",),
    "cudf": ("cudf-cu13", "cudf-cu12", "cudf"),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "dask-cuda": ("dask-cuda",),
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
    "xgboost": ("xgboost",),
    "prefect": ("prefect",),
    "serin": ("serin",),
}
_TRITON = (
    "import json; from importlib.metadata import version, distributions\n"
    "names = {found.metadata['Name'] for found in distributions()}\n"
    "wanted = [n for n in ('nvidia-pytriton', 'onnxruntime-gpu', 'onnxruntime', 'numpy') if n in names]\n"
    "print(json.dumps({name: version(name) for name in wanted}))"
)


def read_versions() -> dict[str, Any]:
    """None for what is not installed."""
    driver, cuda = _driver()
    found: dict[str, Any] = {
        "gpu": [device.name for device in inventory()],
        "driver": driver,
        "cuda": cuda,
        "python": platform.python_version(),
    }
    found |= {name: _first(candidates) for name, candidates in PACKAGES.items()}
    return {**found, "triton": _triton()}


def show_versions(facts: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """When, on which commit and under which versions a table was made."""
    known = " ".join(f"{name}={value}" for name, value in versions.items() if isinstance(value, str))
    triton = " ".join(f"{name}={value}" for name, value in (versions.get("triton") or {}).items())
    return "\n".join(
        [
            f"{facts['date']}, commit {facts['commit'] or 'unknown'}, {', '.join(versions['gpu']) or 'no GPU'}",
            known,
            f"Triton's environment: {triton or 'not found'}",
        ]
    )


def _driver() -> tuple[str | None, str | None]:
    """The driver's version, and the newest CUDA that it supports."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, None
    if library.nvmlInit_v2() != 0:
        return None, None
    text, number = ctypes.create_string_buffer(96), ctypes.c_int()
    library.nvmlSystemGetDriverVersion(text, 96)
    library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
    return text.value.decode(), f"{number.value // 1000}.{number.value % 1000 // 10}"


def _first(candidates: tuple[str, ...]) -> str | None:
    for name in candidates:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _triton() -> dict[str, str] | None:
    """The packages of Triton's own environment, by which its server comes."""
    try:
        python = find_triton().python_folder / "python3"
    except TritonMissing:
        return None
    done = subprocess.run([str(python), "-c", _TRITON], capture_output=True, text=True, timeout=60)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else None
