"""What `serin gc` may remove: datasets, data frames and imported graphs no kept version came from, old versions, old
runs, environments that no run used lately, leftovers.

Nothing goes that a living process uses (machine/locks.py), and nothing that was made or found within `keep_days`.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serin.machine import packages
from serin.machine.locks import unused
from serin.store.artifacts import Release
from serin.store.runs import input_lock, inputs, run_lock
from serin.store.store import Store

DAY_S = 86400.0
_MARKERS = {"dataset": "dataset.json", "package": "package.json"}  # whose time says when it was found last


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    keep_versions: int = 5  # the newest of each model, and editions of each version, besides the aliased ones
    keep_days: float = 7.0  # datasets and runs that were made or found since always stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    kind: str  # dataset, version, edition, package, run, workspace, table, graph, kept file, environment
    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Something that may go unless it is in use; `age` is the file or folder whose time says when it was found last."""

    kind: str
    name: str
    path: Path
    lock: Path
    age: Path | None = None


def collect_garbage(store: Store, home: Path, policy: Policy, *, remove: bool) -> list[Garbage]:
    """What the policy lets go; gone already if `remove`. Only for a store on a local file system (else
    remote_retention.py)."""
    assert store.local, "an object store has other rules: remote_retention.py"
    root = Path(store.url.removeprefix("file://"))
    if not root.is_dir() and not home.is_dir():
        return []  # asking must not make them

    candidates = [
        _Candidate(
            kind=kind,
            name=name,
            path=root / place,
            lock=store.lock(place),
            age=root / place / _MARKERS[kind] if kind in _MARKERS else None,
        )
        for kind, name, place in unneeded(store, policy)
    ]
    found = _collect(store, root, candidates, policy, remove=remove)
    return found + collect_on_this_host(store, home, policy, remove=remove)


def unneeded(store: Store, policy: Policy) -> Iterator[tuple[str, str, str]]:
    """Kind, name and place of the versions, datasets and packages that no version that is kept needs, however young."""
    kept_datasets: set[str] = set()
    kept_packages: set[str] = set()
    for model in store.models():
        versions, aliased = store.versions(model), store.aliased(model).values()
        kept = set(versions[-policy.keep_versions :]) | {release.version for release in aliased}
        for version in versions:
            place = f"models/{model}/versions/{version}"
            editions = store.editions(model, version)[1:]
            fresh = editions[-policy.keep_versions :] if version in kept else []
            for edition in editions:
                release = Release(model=model, version=version, edition=edition)
                if edition not in fresh and release not in aliased:
                    yield "edition", release.name, f"models/{model}/versions/{release.label}"
            if version in kept:
                lineage = json.loads(store.read_published(place, "manifest.json") or b"{}").get("lineage", {})
                kept_datasets.add(str(lineage.get("dataset")))
                kept_packages.add(str(lineage.get("package")))
            else:
                yield "version", f"{model}-v{version}", place
    for name in store.datasets():
        description = json.loads(store.read_published(f"datasets/{name}", "dataset.json") or b"{}")
        if str(description.get("digest")) not in kept_datasets:
            yield "dataset", name, f"datasets/{name}"
    for name in store.shared_files().names("packages/"):
        if name not in kept_packages:
            yield "package", name, f"packages/{name}"


def collect_on_this_host(store: Store, home: Path, policy: Policy, *, remove: bool) -> list[Garbage]:
    """Of runs, inputs and leftovers of builds here, what the policy lets go."""
    work = store.workspace_parent()
    candidates = (*_workspaces(store, work), *_runs(home), *_inputs(store, home), *_environments(home))
    found = _collect(store, work, candidates, policy, remove=remove)
    kept = store.kept_folder()
    if not kept.is_dir():
        return found
    with unused(store.lock("kept")) as free:
        for path in _unasked(kept, policy) if free else ():
            found.append(_garbage("kept file", path.name, path))
            if remove:
                path.unlink(missing_ok=True)
    return found


def _collect(
    store: Store, root: Path, candidates: Iterable[_Candidate], policy: Policy, *, remove: bool
) -> list[Garbage]:
    found = []
    for one in candidates:
        if not _is_old(one, policy):
            continue
        with unused(one.lock) as free:
            if free and _is_old(one, policy):  # it may have been found in the meantime
                found.append(_garbage(one.kind, one.name, one.path))
                if remove:
                    _remove(store, root, one)
    return found


def _workspaces(store: Store, folder: Path) -> Iterator[_Candidate]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        yield _Candidate(kind="workspace", name=path.name, path=path, lock=store.workspace_lock(path.name))


def _runs(home: Path) -> Iterator[_Candidate]:
    for path in sorted((home / "runs").glob("*/")):
        yield _Candidate(kind="run", name=path.name, path=path, lock=run_lock(home, path.name), age=path)


def _environments(home: Path) -> Iterator[_Candidate]:
    for path, lock, age in packages.made(home):
        yield _Candidate(kind="environment", name=path.name, path=path, lock=lock, age=age)


def _inputs(store: Store, home: Path) -> Iterator[_Candidate]:
    """Tables and graphs that no version in the store was made of: retraining reads them again."""
    if not (made := inputs(home)):
        return
    versions = [(model, version) for model in store.models() for version in store.versions(model)]
    specs = [spec for each in versions if (spec := store.read_file(*each, "spec.yaml")) is not None]
    for path in made:
        if not any(path.name.encode() in spec for spec in specs):
            lock, kind = input_lock(home, path), "graph" if path.is_dir() else "table"
            yield _Candidate(
                kind=kind, name=path.name, path=path, lock=lock, age=lock if lock.exists() else path
            )


def _unasked(folder: Path, policy: Policy) -> list[Path]:
    """What builds kept of single files and nobody asked for in a while. While no build runs, halves are leftovers."""
    entries = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in entries if "-" in path.name or _old(path, policy)]


def _remove(store: Store, root: Path, one: _Candidate) -> None:
    if one.kind in ("dataset", "version", "edition", "package"):
        store.remove(str(one.path.relative_to(root)))
    elif one.path.is_dir():
        going = one.path.with_name(f"{one.path.name}{packages.MAKING}{secrets.token_hex(4)}")
        with suppress(OSError):
            one.path.rename(going)  # half of it must not be taken for the whole
            shutil.rmtree(going, ignore_errors=True)
    else:
        one.path.unlink(missing_ok=True)
    one.lock.unlink(missing_ok=True)


def _is_old(one: _Candidate, policy: Policy) -> bool:
    return one.age is None or _old(one.age, policy)


def _old(path: Path, policy: Policy) -> bool:
    try:
        return time.time() - path.stat().st_mtime > policy.keep_days * DAY_S
    except FileNotFoundError:
        return False


def _garbage(kind: str, name: str, path: Path) -> Garbage:
    size = sum(entry.stat().st_size for entry in (path, *path.rglob("*")) if entry.is_file())
    return Garbage(kind=kind, name=name, bytes=size)
