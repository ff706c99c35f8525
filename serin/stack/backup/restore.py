"""Restores a backup into an empty home: complete or not at all.

Every file is checked against the manifest before anything appears in its place. The processes of a rollout that was
open are gone: its journal gets one more decision, by which it is held until a person resumes or aborts it.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from serin.errors import BackupBroken, BackupRefused
from serin.machine import environment
from serin.machine.durable import make_private, sync
from serin.rollout.decide.state import restored
from serin.rollout.run.journal import StoreJournals
from serin.rollout.run.leadership import HomeLock
from serin.rollout.run.record import decision2rollout, rollout2decision
from serin.stack.backup import contents
from serin.stack.backup.contents import Entry, Manifest
from serin.store.home_objects import HomeObjects
from serin.store.store import Store

_BLOCK = 1 << 20
_SECRET_MODE = 0o600


def restore_backup(home: Path, store: Store, path: Path) -> Manifest:
    """Returns the manifest, with the rollouts that are held now.

    Raises BackupRefused when `home` or the store is not empty, and BackupBroken for a file that is not whole.
    """
    if not path.is_file():
        raise BackupRefused(what=str(path), reason="there is no such file")
    _check_empty(home, "restore into an empty SERIN_HOME")
    with _workspace(home) as scratch:
        manifest = _unpack(path, scratch)
        _check_store(manifest, store)
        unpacked = make_private(scratch / contents.HOME)
        if manifest.signed:
            make_private(unpacked / contents.TRUST)
        held = _hold_rollouts(unpacked, manifest, path)
        if manifest.with_store:
            _place_store(scratch / contents.STORE, Path(store.url), unpacked, home)
        if home.exists():
            home.rmdir()
        unpacked.rename(home)
        sync(home.parent)
    return replace(manifest, open_rollouts=held)


def _hold_rollouts(home: Path, manifest: Manifest, path: Path) -> tuple[str, ...]:
    """Returns the models whose rollout is held; that of another one had decided and is completed."""
    created, held = datetime.fromtimestamp(manifest.created, UTC), []
    reason = f"restored from a backup of {created:%Y-%m-%d %H:%M} UTC"
    with HomeLock(home) as lock:
        journals = StoreJournals(HomeObjects(home), lock, lock.term)
        for model in manifest.open_rollouts:
            now, journal = time.time(), journals.open(model)
            decisions = journal.all()
            if not decisions:
                raise BackupBroken(path=path, reason=f"it has no journal of the open rollout of {model}")
            then = restored(decision2rollout(decisions[-1]), now, reason, by=environment.actor())
            journal.append(rollout2decision(then, now))
            if then.hold:
                held.append(model)
    return tuple(held)


def _check_empty(folder: Path, advice: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BackupRefused(what=str(folder), reason=f"it is not empty; {advice}")


def _check_store(manifest: Manifest, store: Store) -> None:
    """The model versions are in the backup, or in the store that the backup names."""
    if manifest.with_store:
        if not store.local:
            raise BackupRefused(
                what=store.url,
                reason="this backup holds its store: unset SERIN_STORE, or name an empty folder",
            )
        _check_empty(Path(store.url), "name an empty folder in SERIN_STORE")
        return
    missing = [
        f"{model} version {version}"
        for model, version in manifest.live.items()
        if store.manifest_digest(model, version) is None
    ]
    if missing:
        raise BackupRefused(
            what=store.url,
            reason=f"it has no {', '.join(missing)}; set SERIN_STORE to the store of the backup ({manifest.store})",
        )


@contextmanager
def _workspace(home: Path) -> Iterator[Path]:
    """A private folder beside the home, on the same disk."""
    home.parent.mkdir(parents=True, exist_ok=True)
    scratch = home.with_name(f".{home.name}.restore-{secrets.token_hex(6)}")
    scratch.mkdir(mode=0o700)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unpack(path: Path, scratch: Path) -> Manifest:
    found: dict[str, Entry] = {}
    manifest: Manifest | None = None
    try:
        with tarfile.open(path, mode="r:") as archive:
            for member in archive:
                if manifest is not None or not member.isfile() or member.issparse() or member.name in found:
                    raise BackupBroken(path=path, reason=f"{member.name!r} does not belong in it")
                if member.name == contents.MANIFEST:
                    manifest = Manifest.parse(_bytes(archive, member), path=path)
                else:
                    found[member.name] = _write(archive, member, _place(scratch, member.name, path))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise BackupBroken(path=path, reason=str(error)) from error
    if manifest is None:
        raise BackupBroken(path=path, reason=f"it has no {contents.MANIFEST}")
    if found != dict(manifest.files):
        different = sorted(
            name for name in {*found, *manifest.files} if found.get(name) != manifest.files.get(name)
        )
        raise BackupBroken(path=path, reason=f"{different[0]} differs from its manifest")
    return manifest


def _place(scratch: Path, name: str, path: Path) -> Path:
    parts = PurePosixPath(name).parts
    if parts[:1] not in ((contents.HOME,), (contents.STORE,)) or len(parts) < 2 or {"..", "/"} & set(parts):
        raise BackupBroken(path=path, reason=f"{name!r} does not belong in it")
    return scratch.joinpath(*parts)


def _bytes(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    source = archive.extractfile(member)
    assert source is not None
    return source.read()


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> Entry:
    source = archive.extractfile(member)
    assert source is not None
    _make_folders(target.parent)
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as stream:
        target.chmod(_SECRET_MODE)
        while block := source.read(_BLOCK):
            digest.update(block)
            size += len(block)
            stream.write(block)
    sync(target)
    return Entry(size=size, sha256=digest.hexdigest())


def _make_folders(folder: Path) -> None:
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(mode=0o700)


def _place_store(unpacked: Path, target: Path, home_now: Path, home: Path) -> None:
    """Moves the store into its place, which may be inside the home."""
    if target.is_relative_to(home):
        target = home_now / target.relative_to(home)
    if not unpacked.is_dir():
        return  # a stack without a model
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rmdir()
    shutil.move(unpacked, target)
