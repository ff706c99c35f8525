"""Infrastructure that the tests in this folder need.

A part is a module in parts/ with `install()`, which installs it or raises `Missing` and may be called again. What is
not a Debian package is kept in one folder (`FOLDER`), by version.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("SERIN_CLUSTER_PARTS") or Path.home() / ".cache" / "serin-cluster-parts")


class Missing(Exception):
    """A part that cannot be had here, with the reason."""


@functools.cache
def need(name: str) -> None:
    """Installs a part; skips the calling test with the reason when it cannot be had here."""
    try:
        importlib.import_module(f"tests.cluster.parts.{name}").install()
    except Missing as error:
        pytest.skip(f"{name} is missing: {error}")


def apt_install(*packages: str) -> None:
    """Installs Debian packages without starting their daemons."""
    if os.geteuid() != 0:
        raise Missing(f"not root, so these Debian packages were not installed: {', '.join(packages)}")
    present = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}\n", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    if present.returncode == 0 and set(present.stdout.split()) == {"installed"}:
        return
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-qy", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=600", *packages],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if done.returncode:
            raise Missing(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
