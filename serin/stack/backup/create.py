"""Writes a backup of a stack to one file, also while the stack runs.

Journals and aliases are read again until nothing has changed in between, so both are of one moment. Model versions
never change. SQLite copies its databases itself. Other files appear by rename and are whole at any moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import secrets
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from serin.errors import BackupRefused
from serin.formats.serving.journal import load_decision
from serin.host.state import read_stack
from serin.machine.durable import sync
from serin.rollout.decide.state import Phase
from serin.stack.backup import contents
from serin.stack.backup.contents import Entry, Manifest
from serin.store.store import Store
from serin.windows.lmdb_state import DATA, copy_state

_TRIES = 50  # a rollout decides twice a second; reading a journal takes milliseconds


def create_backup(home: Path, store: Store, path: Path, *, captures: bool = True) -> Manifest:
    """Write the backup to `path`, complete or not at all, readable by its owner only: it holds secrets.

    Raises BackupRefused when there is no stack in `home`, or when `path` exists.
    """
    if not home.is_dir():
        raise BackupRefused(what=str(home), reason="there is no stack here; set SERIN_HOME")
    if path.exists():
        raise BackupRefused(what=str(path), reason="it exists; name a new file")
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with (
            os.fdopen(descriptor, "wb") as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            manifest = _fill(_Writer(archive), home, store, captures=captures)
        sync(scratch)
        scratch.rename(path)
        sync(path.parent.absolute())
    finally:
        scratch.unlink(missing_ok=True)
    return manifest


@dataclass(slots=True)
class _Writer:
    """Adds files to the archive and remembers what they hold. The manifest is the last one."""

    archive: tarfile.TarFile
    files: dict[str, Entry] = field(default_factory=dict)

    def add(self, name: str, data: bytes) -> None:
        self._add(name, io.BytesIO(data), len(data))
        self.files[name] = Entry(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    def add_file(self, name: str, path: Path) -> None:
        """A file that was removed in the meantime is left out."""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size  # one that is appended to is cut here
            digest = hashlib.sha256()
            self._add(name, _Hashed(source, digest), size)
            self.files[name] = Entry(size=size, sha256=digest.hexdigest())

    def _add(self, name: str, source: io.IOBase | _Hashed, size: int) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = size, 0o600, int(time.time())
        self.archive.addfile(entry, source)


@dataclass(slots=True)
class _Hashed:
    """A file whose content is hashed as it is read."""

    source: io.BufferedReader
    digest: hashlib._Hash

    def read(self, size: int = -1) -> bytes:
        data = self.source.read(size)
        self.digest.update(data)
        return data


def _fill(writer: _Writer, home: Path, store: Store, *, captures: bool) -> Manifest:
    stack = read_stack(home)
    root = Path(store.url) if store.local else None
    moment = _settled(home, store)
    for name, data in moment.files.items():
        writer.add(name, data)
    if root is not None:
        for relative in contents.model_files(root):
            name = f"{contents.STORE}/{relative}"
            if name not in writer.files:
                writer.add_file(name, root / relative)
    for relative in contents.home_files(home, captures=captures):
        writer.add_file(f"{contents.HOME}/{relative}", home / relative)
    for database in contents.DATABASES:
        if (home / database).is_file():
            with _copied(home / database) as copy:
                writer.add_file(f"{contents.HOME}/{database}", copy)
    if (home / contents.EVENTS / DATA).is_file():
        with tempfile.TemporaryDirectory(prefix="serin-events-") as folder:
            copy_state(home / contents.EVENTS, Path(folder))
            writer.add_file(f"{contents.HOME}/{contents.EVENTS}/{DATA}", Path(folder, DATA))
    manifest = Manifest(
        created=time.time(),
        serin=importlib.metadata.version("serin"),
        store=store.url,
        with_store=store.local,
        owns_prefect=stack is None or stack.owns_prefect,
        signed=(home / contents.TRUST).is_dir(),
        live=moment.live,
        open_rollouts=moment.open_rollouts,
        files=dict(writer.files),
    )
    _check(manifest)
    writer.add(contents.MANIFEST, json.dumps(manifest.to_json(), indent=1).encode())
    return manifest


def _check(manifest: Manifest) -> None:
    """The version that serves each model must be in the archive."""
    for model, version in manifest.live.items():
        name = f"{contents.STORE}/models/{model}/versions/{version}/manifest.json"
        if manifest.with_store and name not in manifest.files:
            raise BackupRefused(
                what=f"{model} version {version}",
                reason="it is live and has gone from the store while the backup was made; try again",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    files: dict[str, bytes]
    live: dict[str, int | str]
    open_rollouts: tuple[str, ...]


def _settled(home: Path, store: Store) -> _Moment:
    """Journals and aliases of one moment."""
    before = _read(home, store)
    for _ in range(_TRIES):
        now = _read(home, store)
        if now == before:
            return _moment(store, now)
        before = now
    raise BackupRefused(
        what=str(home / contents.JOURNALS),
        reason="it changes faster than it can be read; pause the rollouts (`serin rollout pause MODEL`) and try again",
    )


def _read(home: Path, store: Store) -> dict[str, bytes]:
    found = {}
    for relative in contents.journal_files(home):
        with contextlib.suppress(FileNotFoundError):
            found[f"{contents.HOME}/{relative}"] = (home / relative).read_bytes()
    if store.local:
        for file in sorted(Path(store.url).glob("models/*/aliases.json")):
            name = f"{contents.STORE}/{file.relative_to(store.url)}"
            with contextlib.suppress(FileNotFoundError):
                found[name] = file.read_bytes()
    return found


def _moment(store: Store, files: dict[str, bytes]) -> _Moment:
    newest: dict[str, tuple[str, bytes]] = {}  # by model; names sort by number
    for name, data in sorted(files.items()):
        if name.endswith(".json") and name.split("/")[-2] == "decisions":
            newest[name.split("/")[-3]] = (name, data)
    last = {model: load_decision(name, data) for model, (name, data) in newest.items()}
    unfinished = [model for model, decision in last.items() if not Phase(decision.phase).final]
    live: dict[str, int | str] = {}
    for model in store.models():
        aliases = files.get(f"{contents.STORE}/models/{model}/aliases.json")
        if aliases is not None:
            found = json.loads(aliases)
        else:
            found = {alias: release.label for alias, release in store.aliased(model).items()}
        if "live" in found:
            live[model] = int(found["live"]) if str(found["live"]).isdigit() else str(found["live"])
    return _Moment(files=files, live=live, open_rollouts=tuple(unfinished))


@contextlib.contextmanager
def _copied(database: Path) -> Iterator[Path]:
    """A copy of a database in use, of one moment."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.sqlite"
        uri = f"{database.absolute().as_uri()}?mode=ro"
        with (
            contextlib.closing(sqlite3.connect(uri, uri=True)) as source,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        yield copy
