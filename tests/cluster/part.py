"""Infrastructure that the tests in this folder need.

A part is a module in parts/ with `install()`, which installs it or raises `Missing` and may be called again. What is
not a Debian package is kept in one folder (`FOLDER`), by version; it calls `making` before it makes something.
"""

import functools
import importlib
import os
import pkgutil
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serin.machine.locks import locked
from tests.cluster import parts
from tests.cluster.isolated import run_isolated, temporary_folder

_made: list[str] = []
FOLDER = Path(os.environ.get("SERIN_CLUSTER_PARTS") or Path.home() / ".cache" / "serin-cluster-parts")


class Missing(Exception):
    """A part that cannot be had here, with the reason."""


@functools.cache
def need(name: str) -> None:
    """Installs a part; skips the calling test with the reason when it cannot be had here."""
    try:
        _install(name)
    except Missing as error:
        pytest.skip(f"{name} is missing: {error}")


def prepare(*names: str) -> None:
    """Makes these parts, or all, that are not kept from an earlier run, and says of each which it is."""
    for name in names or [module.name for module in pkgutil.iter_modules(parts.__path__)]:
        _made.clear()
        began = time.monotonic()
        try:
            _install(name)
        except Missing as error:
            print(f"  missing  {name}: {error}", flush=True)
        else:
            word = f"made     {name} in {time.monotonic() - began:.0f} s" if _made else f"kept     {name}"
            print(f"  {word}", flush=True)


def run_prepared(module: str, mark: str, *names: str) -> int:
    """Runs this command again, as `module` and with `mark` in its environment, in namespaces (isolated.py). Its parts
    are made before: what is inside does not reach the registries."""
    prepare(*names)
    with temporary_folder() as folder:
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        return run_isolated(command, {**os.environ, "TMPDIR": str(folder), mark: "1"})


def making(what: str) -> None:
    """Says that something is made which a later run finds."""
    _made.append(what)
    print(f"  making   {what}", flush=True)


def _install(name: str) -> None:
    """One process at a time: two runs may need the same part."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with locked(FOLDER / f"{name}.lock"):
        importlib.import_module(f"tests.cluster.parts.{name}").install()


def npm_install(package: str, version: str) -> Path:
    """Installs a program of npm; returns the folder with its commands."""
    place = FOLDER / f"{package}-{version}"
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Missing("node and npm are not installed")
    if not place.exists():
        making(f"{package} {version}")
        scratch = FOLDER / f"{package}-{secrets.token_hex(4)}"
        scratch.mkdir(parents=True)
        try:
            command = ["npm", "install", "--prefix", str(scratch), "--no-save", f"{package}@{version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Missing(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
            scratch.rename(place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return place / "node_modules" / ".bin"


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
    making(f"Debian packages: {', '.join(packages)}")
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-qy", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=600", *packages],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if done.returncode:
            raise Missing(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
