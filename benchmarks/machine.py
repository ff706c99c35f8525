"""Describes the machine on which figures were measured; a ratio means little without it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil


def core_count() -> int:
    """Returns the cores this process may use; each contender gets as many threads."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    processor = _cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "cpu": processor["model"],
        "cpu_flags": processor["flags"],
        "cores": core_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "gpus": _gpus(),
    }


def kind_of_machine() -> str:
    """The kind of machine as part of a file's name: cpu-x86-64-2x-intel-r-xeon-r-processor."""
    found = machine()
    return f"cpu-{name_part(found['architecture'])}-{found['cores']}x-{name_part(found['cpu'])}"


def name_part(text: str) -> str:
    """The text as part of a file's name: lower case, with single dashes for everything but letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class StolenTime:
    """The CPU time that a virtual machine wanted and its host gave to others, from now on."""

    def __init__(self) -> None:
        self._began = psutil.cpu_times()

    def share(self) -> float:
        """Of the time of all cores; 0 where the system does not count it."""
        now = psutil.cpu_times()
        whole = sum(now[:8]) - sum(self._began[:8])  # what follows steal is counted in user and nice already
        stolen = getattr(now, "steal", 0.0) - getattr(self._began, "steal", 0.0)
        return round(stolen / whole, 4) if whole > 0 else 0.0


def _cpuinfo(text: str) -> dict[str, Any]:
    """Reads the CPU model and its flags: x86 names both; ARM gives an implementer, a part number and `Features`."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    arm = f"ARM implementer {fields.get('CPU implementer', '?')} part {fields.get('CPU part', '?')}"
    return {
        "model": fields.get("model name", arm),
        "flags": sorted((fields.get("flags") or fields.get("Features") or "").split()),
    }


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
