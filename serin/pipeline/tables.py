"""Folders of tables in the store, by content: workers on other machines read them at the URL that each gets.

They have the form of packages (store/packages.py), below tables/<digest>. The same files have the same URL. `serin gc`
leaves them alone: a spec may name them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serin.errors import NotFound, SpecError, TablesNeeded
from serin.machine import environment
from serin.pipeline.pack import SPEC, looks_secret
from serin.store.file_list import list_files
from serin.store.packages import FOLDER as PACKAGES
from serin.store.packages import MANIFEST, PackageManifest, renew_files, write_files
from serin.store.store import Store

_TABLES: Final = "tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedTables:
    """`urls`: by the name of each file or folder in the folder, as a spec names it. `sent`: False when the store had
    them. `left_out`: names that are not sent."""

    urls: dict[str, str]
    size: int
    sent: bool
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTables:
    """A pushed folder in the store. `pushed`: when, also if it was pushed again on a later day."""

    digest: str
    urls: dict[str, str]
    size: int
    pushed: float


def push_tables(folder: Path) -> PushedTables:
    """Uploads what the store does not have. Hidden files and those that look like secrets are left out."""
    store = _store("push")
    if not folder.is_dir():
        raise SpecError(
            where=str(folder), problems=[("FOLDER", "is not a folder; name the one with the tables")]
        )
    listed = list_files(folder).files
    real = folder.resolve()
    linked = [name for name in listed if not (folder / name).resolve().is_relative_to(real)]
    secret = [name for name in listed if looks_secret(name, folder / name, folder)]
    left_out = [name for name in listed if name in {*linked, *secret, MANIFEST}]
    manifest = PackageManifest(files={name: file for name, file in listed.items() if name not in left_out})
    if not manifest.files:
        raise SpecError(where=str(folder), problems=[("FOLDER", "holds no file that can be sent")])
    found = renew_files(store, _TABLES, manifest)
    if not found:
        write_files(store, _TABLES, manifest, {name: folder / name for name in manifest.files})
    return PushedTables(
        urls=_urls(store, manifest), size=manifest.size, sent=not found, left_out=tuple(left_out)
    )


def list_tables() -> list[StoredTables]:
    """Returns the folders that were pushed to the store, the newest first."""
    store, now, found = _store("list"), time.time(), []
    for digest in store.shared_files().names(f"{_TABLES}/"):
        stored = store.shared_files().read(f"{_TABLES}/{digest}/{MANIFEST}")
        if stored is not None:
            manifest = PackageManifest.load(stored.content)
            urls, pushed = _urls(store, manifest), now - stored.age_s
            found.append(StoredTables(digest=digest, urls=urls, size=manifest.size, pushed=pushed))
    return sorted(found, key=lambda each: -each.pushed)


def remove_tables(name: str) -> StoredTables:
    """Removes a pushed folder, named by its digest or the beginning of it. TablesNeeded when a package or a version
    names it; specs that are nowhere in the store are not known."""
    store, known = _store("remove"), list_tables()
    named = [each for each in known if name and each.digest.startswith(name)]
    if len(named) != 1:
        raise NotFound(kind="pushed tables", name=name, known=[each.digest[:12] for each in known])
    (going,) = named
    if users := list(_users(store, going.digest)):
        raise TablesNeeded(digest=going.digest[:12], users=", ".join(users))
    files, place = store.shared_files(), f"{_TABLES}/{going.digest}/"
    files.remove(f"{place}{MANIFEST}")  # first: what is left of a removal that was cut short is pushed again
    for entry in files.entries(place):
        files.remove(entry.key)
    return going


def _users(store: Store, digest: str) -> Iterator[str]:
    """What names these tables: packages, whose runs can be repeated, and versions, which are trained again."""
    mark, files = f"{_TABLES}/{digest}/".encode(), store.shared_files()
    for package in files.names(f"{PACKAGES}/"):
        spec = files.read(f"{PACKAGES}/{package}/{SPEC}")
        if spec is not None and mark in spec.content:
            yield f"package {package[:12]}"
    for model in store.models():
        for version in store.versions(model):
            if mark in (store.read_file(model, version, SPEC) or b""):
                yield f"{model} version {version}"


def _urls(store: Store, manifest: PackageManifest) -> dict[str, str]:
    base = store.url if "://" in store.url else str(Path(store.url).expanduser().absolute())
    tops = dict.fromkeys(name.partition("/")[0] for name in manifest.files)
    return {top: f"{base.rstrip('/')}/{_TABLES}/{manifest.digest}/{top}" for top in tops}


def _store(command: str) -> Store:
    if environment.shared_store_url() is None:
        problem = "is not set: the store in SERIN_HOME is on this machine alone; set it to the workers' store"
        raise SpecError(where=f"serin tables {command}", problems=[("SERIN_STORE", problem)])
    return Store.open()
