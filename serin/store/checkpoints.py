"""Folders of trained weights in the store, under `checkpoints/<name>/`: whole or not there.

A name is a path such as `train-1a2b/step-00000020`. Of two writers of the same name the first wins; the content of a
name is determined by it, so the other has lost nothing. A training continues on another host with what is here.
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from serin.errors import BundleBroken, ObjectExists
from serin.machine.durable import sync
from serin.store.file_list import find_published, is_as_listed, list_files, marker_key
from serin.store.store import Store

_TRIES = 3


def publish_checkpoint(store: Store, name: str, folder: Path) -> None:
    """Copies all files of `folder` to the store under `name`. It is visible once all of them are there."""
    files, place = store.shared_files(), f"checkpoints/{name}"
    if files.read(marker_key(place)) is not None:
        return
    mine = list_files(folder)
    files.upload({f"{place}/{mine.attempt}/{file}": folder / file for file in mine.files})
    with suppress(ObjectExists):
        files.create(marker_key(place), mine.to_bytes())


def fetch_checkpoint(store: Store, name: str, target: Path) -> bool:
    """Makes the folder `target` from the store, whole or not at all; False when the store has none of that name.

    The digest of each file is compared. A `target` that exists is left as it is.
    """
    files, place = store.shared_files(), f"checkpoints/{name}"
    published = find_published(files, place)
    if published is None or target.exists():
        return published is not None
    scratch = target.with_name(f".fetched-{target.name}-{secrets.token_hex(4)}")
    try:
        missing = list(published.files)
        for file in missing:
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            files.download({f"{place}/{published.attempt}/{file}": scratch / file for file in missing})
            missing = [file for file in missing if not is_as_listed(scratch / file, published.files[file])]
        if missing:
            raise BundleBroken(path=place, reason=f"{missing[0]} in the store does not match its digest")
        _put_in_place(scratch, target)
    except FileNotFoundError:  # it is being removed
        return False
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def checkpoint_names(store: Store, prefix: str) -> list[str]:
    """The names of complete folders below `prefix`, such as `train-1a2b/`, sorted."""
    base = "published/checkpoints/"
    keys = store.shared_files().keys(f"{base}{prefix}")
    return [key.removeprefix(base).removesuffix(".json") for key in keys]


def remove_checkpoint(store: Store, name: str) -> None:
    """Takes a folder away: what makes it complete first."""
    files, place = store.shared_files(), f"checkpoints/{name}"
    files.remove(marker_key(place))
    for key in files.keys(f"{place}/"):
        files.remove(key)


def _put_in_place(scratch: Path, target: Path) -> None:
    for path in (scratch, *scratch.rglob("*")):
        sync(path)
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise
    sync(target.parent)
