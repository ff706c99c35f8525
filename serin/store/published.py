"""Reads the metadata of published folders, and manages the folders around them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from serin.errors import BundleBroken, NameInvalid
from serin.machine import environment
from serin.machine.durable import make_private
from serin.store.artifacts import Bundle, Dataset, Release

BUNDLE_FORMAT: Final = "serin.bundle"
SERVER: Final = "server.json"  # in the place of a graph: the address of a server that Serin does not run
BUNDLE_VERSION: Final = 2

_DIGEST = re.compile(r"[0-9a-f]{8,64}")


def dataset_at(folder: Path) -> Dataset:
    description = _read_json(folder / "dataset.json")
    rows = {split: int(entry["rows"]) for split, entry in description["splits"].items()}
    return Dataset(path=str(folder), digest=str(description["digest"]), rows=rows)


def bundle_at(folder: Path, release: Release) -> Bundle:
    """Raises BundleBroken when the manifest names another model or version: a signature is of the manifest, so files
    that were copied to another place would take it with them."""
    manifest = folder / "manifest.json"
    raw = manifest.read_bytes()
    with suppress(ValueError):  # a manifest that cannot be read is refused by who reads it
        document = json.loads(raw)
        _check_place(document, folder, release)
    digest = hashlib.sha256(raw).hexdigest()
    metrics = folder / "metrics.json"
    numbers = (
        {k: float(v) for k, v in _read_json(metrics).items() if isinstance(v, int | float)}
        if metrics.is_file()
        else {}
    )
    return Bundle(
        path=str(folder),
        model=release.model,
        version=release.version,
        edition=release.edition,
        digest=digest,
        metrics=numbers,
    )


def _check_place(document: Any, folder: Path, release: Release) -> None:
    if not isinstance(document, dict) or document.get("format") != BUNDLE_FORMAT:
        return
    name, number, edition = (document.get(key) for key in ("name", "model_version", "edition"))
    if (name, number, edition or 1) != (release.model, release.version, release.edition):
        found = f"{number}e{edition}" if edition else number
        reason = (
            f"it contains {name} version {found}, not {release.model} version {release.label}; restore the version's "
            "own files, or take these as a new version with `serin models import`"
        )
        raise BundleBroken(path=str(folder), reason=reason)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise BundleBroken(path=str(path), reason=f"not JSON: {error}") from error


def checked_digest(digest: str) -> str:
    """What names a folder, or NameInvalid."""
    if not _DIGEST.fullmatch(digest):
        raise NameInvalid(kind="digest", name=digest, rule="8 to 64 hexadecimal digits")
    return digest


def touch(marker: Path) -> None:
    """Marks it as recently used for `serin gc`."""
    with suppress(OSError):  # a store that is only read
        os.utime(marker)


def make_home_of(folder: Path) -> None:
    """A store or a cache may be the first thing in the home."""
    home = environment.home()
    if folder.is_relative_to(home):
        make_private(home)
