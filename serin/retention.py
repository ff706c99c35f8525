"""What may go (`serin gc`): datasets no kept version came from, old versions, old runs, leavings of the dead."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from serin.runs import runs
from serin.store import Store

DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    keep_versions: int = 5  # the newest of each model, besides the aliased ones
    keep_days: float = 7.0  # datasets and runs younger than this always stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    kind: str  # dataset, version, run, workspace, kept file
    name: str
    bytes: int


def collect_garbage(store: Store, home: Path, policy: Policy, *, remove: bool) -> list[Garbage]:
    """What the policy lets go; gone already if `remove`. Only for a store on a local file system."""
    assert store.local, "retention of an object store is the object store's own (lifecycle rules)"
    root = Path(store.url.removeprefix("file://"))
    found: list[tuple[Garbage, str]] = []
    kept_datasets: set[str] = set()
    for model in store.models():
        versions = store.versions(model)
        kept = set(versions[-policy.keep_versions :]) | set(store.aliases(model).values())
        for version in versions:
            relative = f"models/{model}/versions/{version}"
            if version in kept:
                kept_datasets |= _dataset_of(root / relative)
            else:
                found.append((_garbage("version", f"{model}-v{version}", root / relative), relative))
    for digest in store.datasets():
        relative = f"datasets/{digest}"
        if digest not in kept_datasets and _old(root / relative / "dataset.json", policy):
            found.append((_garbage("dataset", digest, root / relative), relative))
    leavings = [(path, "workspace") for path in _dead_workspaces(root)]
    leavings += [(path, "kept file") for path in _unasked(store.kept_folder(), policy)]
    leavings += [(home / "runs" / run, "run") for run in runs(home) if _old(home / "runs" / run, policy)]
    if remove:
        for _, relative in found:
            store.remove(relative)
    garbage = [entry for entry, _ in found]
    for path, kind in leavings:
        garbage.append(_garbage(kind, path.name, path))
        if remove:
            _remove(path)
    return garbage


def _unasked(folder: Path, policy: Policy) -> list[Path]:
    """What builds kept of single files: those not asked for in a while, and the halves of the dead."""
    entries = sorted(path for path in folder.rglob("*") if path.is_file())
    halves = [path for path in entries if "-" in path.name and not _alive(path.name.split("-")[0])]
    return [*halves, *(path for path in entries if "-" not in path.name and _old(path, policy))]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _dataset_of(bundle: Path) -> set[str]:
    lineage = json.loads((bundle / "manifest.json").read_text()).get("lineage", {})
    return {str(lineage["dataset"])} if "dataset" in lineage else set()


def _dead_workspaces(root: Path) -> list[Path]:
    folder = root / "work"
    entries = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(entry for entry in entries if not _alive(entry.name.split("-")[0]))


def _alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _old(path: Path, policy: Policy) -> bool:
    return path.exists() and time.time() - path.stat().st_mtime > policy.keep_days * DAY_S


def _garbage(kind: str, name: str, path: Path) -> Garbage:
    size = sum(entry.stat().st_size for entry in (path, *path.rglob("*")) if entry.is_file())
    return Garbage(kind=kind, name=name, bytes=size)
