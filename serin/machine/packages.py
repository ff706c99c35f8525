"""The environment of a spec: packages that a user's own code imports and this installation lacks.

    <home>/environments/<name>/site-packages      the packages
    <home>/environments/<name>/environment.json   what they were made from, and their versions
    <home>/environments/<name>.making-*           one that is being made or removed: its folder has the name while it is
                                                  complete
    <home>/environments/locks/<name>              held by processes that use it or make it

The name follows from what the spec asks for, what is installed here, Python and the platform. uv resolves with every
installed package pinned to its version, and installs what is lacking. So Serin runs with the packages that it was
tested with, and the folder comes last on the path. A process enters one environment at most.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from serin.errors import EnvironmentFailed, EnvironmentRefused
from serin.machine import environment, uv
from serin.machine.durable import write_whole
from serin.machine.locks import hold_until_exit, locked
from serin.spec.code_digest import forget_installed
from serin.spec.environment import EnvironmentSpec

logger = logging.getLogger(__name__)

RECORD = "environment.json"
_ROOT = "environments"
_PACKAGES = "site-packages"  # by this name it counts as installed, and not as the user's own code
MAKING = ".making-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The environment that this process is in. `digest`: of what its spec asks for. `packages`: those that were added,
    as `name==version`, in `folder`; None: an image has them."""

    spec: EnvironmentSpec
    digest: str
    folder: Path | None = None
    packages: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.digest[:12]} ({self.spec})"


_entered: list[Entered] = []


def entered() -> Entered | None:
    """The environment that this process is in; None: only what is installed here."""
    return _entered[0] if _entered else None


def enter(spec: EnvironmentSpec, *, stored: bool = False) -> None:
    """Makes the packages of `spec` importable in this process and in those that it starts. They are made first where
    they are missing. An image is only noted: see `refuse_other_image`.

    `stored`: the spec is that of a published version, which does not have to run here: the environment that this
    process is in already stays as it is.
    """
    now = entered()
    if stored and (now is not None or spec.image is not None):
        return
    digest = spec.digest()
    if now is not None:
        if now.digest != digest:
            reason = f"this process is in the environment {now} already; start another process, or kernel"
            raise EnvironmentRefused(reason=reason)
        return
    if spec.image is not None:
        _entered.append(Entered(spec=spec, digest=digest))
        return
    environment.stop_importing_below(environment.home() / _ROOT)  # a parent process may be in another one
    folder = obtain(spec)
    environment.import_from(folder / _PACKAGES)
    forget_installed()
    packages = tuple(json.loads((folder / RECORD).read_bytes())["packages"])
    _entered.append(Entered(spec=spec, digest=digest, folder=folder / _PACKAGES, packages=packages))


def refuse_other_image() -> None:
    """Raises EnvironmentRefused when the spec names an image and this process runs in another one, or in none."""
    now, here = entered(), environment.text("SERIN_IMAGE")
    if now is not None and now.spec.image is not None and now.spec.image != here:
        where = f"this one runs in {here}" if here else "this process is not in a Job of Serin's worker"
        reason = f"environment.image is the image of a Job on Kubernetes ({now.spec.image}), and {where}"
        raise EnvironmentRefused(reason=f"{reason}; use environment.requirements or environment.lock here")


def obtain(spec: EnvironmentSpec) -> Path:
    """The folder of an environment, which is made if it is missing. It is in use until this process ends."""
    installed = _installed()
    root = environment.home() / _ROOT
    folder = root / _name(spec, installed)
    lock = root / "locks" / folder.name
    hold_until_exit(lock)  # makes the folder of locks
    try:
        if not (folder / RECORD).is_file():
            with locked(lock.with_name(f"{lock.name}{MAKING}lock")):
                if not (folder / RECORD).is_file():
                    _make(spec, installed, folder)
        os.utime(folder / RECORD)  # `serin gc` sees when it was used last
    except OSError as error:
        raise EnvironmentFailed(reason=str(error)) from error
    return folder


def made(home: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Every environment, and what killed processes left of others: the folder, its lock, and what says how old it
    is."""
    root = home / _ROOT
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.name != "locks":
            whole = folder / RECORD
            lock = root / "locks" / folder.name.partition(MAKING)[0]
            yield folder, lock, whole if whole.is_file() else folder


def _name(spec: EnvironmentSpec, installed: Mapping[str, str]) -> str:
    here = [sys.implementation.cache_tag, sysconfig.get_platform(), sorted(installed.items())]
    return hashlib.sha256(json.dumps([spec.digest(), here]).encode()).hexdigest()[:16]


def _installed() -> dict[str, str]:
    """The version of every package that this process can import."""
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        if name := one.metadata["Name"]:
            found.setdefault(canonicalize_name(name), one.version)  # the first on the path is imported
    return found


def _make(spec: EnvironmentSpec, installed: Mapping[str, str], folder: Path) -> None:
    """Fills a folder and renames it: what a killed process leaves has another name."""
    began, root = time.monotonic(), folder.parent
    for leftover in (folder, *root.glob(f"{folder.name}{MAKING}*")):
        shutil.rmtree(leftover, ignore_errors=True)
    logger.info(f"making the environment of {spec}")
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}{MAKING}", dir=root))
    try:
        lacking = (
            uv.resolve_lock(Path(spec.lock), installed) if spec.lock else uv.resolve(spec.parsed(), installed)
        )
        target = scratch / _PACKAGES
        target.mkdir()
        if lacking:
            uv.install(lacking, target)
        _remove_shadowed(target)
        seconds = time.monotonic() - began
        packages = sorted(f"{name}=={version}" for name, version in _versions(target).items())
        record = {"asked": str(spec), "packages": packages, "seconds": round(seconds, 2)}
        write_whole(scratch / RECORD, json.dumps(record, indent=1) + "\n")
        os.sync()
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    added = ", ".join(packages) if packages else "everything is installed here already"
    logger.info(f"environment {folder.name} made in {seconds:.1f} s: {added}")


def _versions(target: Path) -> dict[str, str]:
    return {one.metadata["Name"]: one.version for one in importlib.metadata.distributions(path=[str(target)])}


def _remove_shadowed(target: Path) -> None:
    """Two packages may hold one module, such as xgboost and xgboost-cpu: the one that is installed here is used, in
    whatever order a process looks."""
    here = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    for entry in sorted(target.iterdir()):
        module = entry.name.partition(".")[0]
        is_module = (entry / "__init__.py").is_file() if entry.is_dir() else entry.suffix in (".py", ".so")
        found = importlib.machinery.PathFinder.find_spec(module, here) if is_module else None
        if found is None or found.origin is None:
            continue
        logger.info(f"the environment's module {module} is not used: the worker has one of that name")
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
