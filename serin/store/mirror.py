"""A folder that one process writes, kept in a store as a whole, so that another process continues with it or reads it.

    <prefix>/state.json            the files by name, changed by compare-and-swap only
    <prefix>/files/<term>/<sha256> their contents

A writer uploads contents first and names them then: what was not named is not there. A writer that was replaced cannot
name anything any more, and what it still uploads or removes is stored under its term.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from serin.errors import FileBroken, LeadershipLost, ObjectChanged, ObjectExists
from serin.machine.durable import make_private, write_whole
from serin.machine.locks import locked
from serin.machine.typed_json import Document
from serin.store.objects import Objects, checked_key, swap

_TRIES: Final = 5  # a content may be replaced between the look and the read
_DATABASE: Final = ".sqlite"
_HERE: Final = ".mirror.json"  # in a copy: the state that it is of

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class State(Document, form="serin.mirror"):
    """`term`: of the writer. `files`: by name, the place of its content."""

    term: int = 0
    files: Mapping[str, str] = field(default_factory=dict)

    def below(self, folders: tuple[str, ...]) -> dict[str, str]:
        """The files in these folders, each of which may be a file; all, if there are none."""
        names = tuple(f"{folder}/" for folder in folders) or ("",)
        return {
            name: place for name, place in self.files.items() if name in folders or name.startswith(names)
        }


class Mirror:
    """`folders`: what is kept of `folder`, each with all that is in it but hidden files and locks."""

    def __init__(self, objects: Objects, prefix: str, folder: Path, folders: tuple[str, ...]) -> None:
        self._objects, self._prefix, self._folder, self._folders = objects, prefix, folder, folders
        self._lock = threading.Lock()
        self._state, self._tag = State(), ""
        self._before: State | None = None
        self._known: dict[str, tuple[Signature, str]] = {}  # by name: what was uploaded

    def adopt(self, term: int) -> None:
        """Fills the folder with what the last writer left, and writes from then on. Raises LeadershipLost when a later
        writer has begun."""
        with self._lock:
            self._state, self._tag = _download(self._objects, self._prefix, self._folder, self._folders)
            (self._folder / _HERE).unlink()  # it is not a copy from now on
            if self._state.term > term:
                raise LeadershipLost(leader="unknown")
            self._known, self._before = {}, None
            self._write(term, self._state.files)  # from now on nothing of an earlier term is named
            named = {f"{self._prefix}/files/{place}" for place in self._state.files.values()}
            for key in set(self._objects.keys(f"{self._prefix}/files/")) - named:
                self._objects.remove(key)  # an upload that was never finished

    def push(self, term: int, *folders: str) -> None:
        """Uploads what has changed, in all folders or these. Raises LeadershipLost when another writer has begun."""
        with self._lock:
            wanted = folders or self._folders
            files = {**self._state.files}
            for name in self._state.below(wanted):
                del files[name]
            for name, path in _files(self._folder, wanted):
                with contextlib.suppress(FileNotFoundError):  # deleted just now
                    files[name] = self._uploaded(term, name, path)
            if files != self._state.files:
                self._write(term, files)

    def _uploaded(self, term: int, name: str, path: Path) -> str:
        signature = _signature(path)
        if name in self._known and self._known[name][0] == signature:
            return self._known[name][1]
        content = _content(path)
        digest = hashlib.sha256(content).hexdigest()
        place = self._state.files.get(name, "")
        if not place.endswith(f"/{digest}"):
            place = f"{term}/{digest}"
            self._objects.put(f"{self._prefix}/files/{place}", content)
        self._known[name] = signature, place
        return place

    def _write(self, term: int, files: Mapping[str, str]) -> None:
        state, key = State(term=term, files=files), f"{self._prefix}/state.json"
        try:
            self._tag = swap(self._objects, key, state.dump(), self._tag or None)
        except (ObjectChanged, ObjectExists) as error:
            self._known = {}
            raise LeadershipLost(leader="unknown") from error
        # Somebody may be reading the contents of the state before.
        old = {*self._before.files.values()} if self._before else set()
        for place in old - {*self._state.files.values()} - {*files.values()}:
            self._objects.remove(f"{self._prefix}/files/{place}")
        self._before, self._state = self._state, state


def fetch(objects: Objects, prefix: str, folder: Path, *folders: str) -> Path:
    """Brings the copy in `folder` up to date, or these folders of it; returns it."""
    make_private(folder)
    with locked(folder / ".lock", mode=0o600):
        _download(objects, prefix, folder, folders)
    return folder


def _download(objects: Objects, prefix: str, folder: Path, folders: tuple[str, ...]) -> tuple[State, str]:
    here = State.load_file(folder / _HERE) or State()
    for trial in range(_TRIES):
        stored = objects.read(f"{prefix}/state.json")
        state = State() if stored is None else _loaded(stored.content, f"{objects.url}/{prefix}/state.json")
        wanted, have = state.below(folders), here.below(folders)
        new = {name: place for name, place in wanted.items() if have.get(name) != place}
        contents = {name: _read(objects, prefix, place) for name, place in new.items()}
        if None in contents.values() and trial < _TRIES - 1:
            continue  # replaced since
        (make_private(folder) / _HERE).unlink(missing_ok=True)
        tops = (path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        for name in {name for name, _ in _files(folder, folders or tuple(tops))} - wanted.keys():
            _remove(folder / name)
        for name, content in contents.items():
            if content is None:
                advice = "its writer, `serin agent`, must be able to write to the store"
                raise FileBroken(path=f"{objects.url}/{prefix}", problem=f"{name} is missing", advice=advice)
            path = folder / checked_key(name)
            for parent in reversed(path.relative_to(folder).parents):
                make_private(folder / parent)
            _remove(path)
            write_whole(path, content)
        rest = {name: place for name, place in here.files.items() if name not in have}
        write_whole(folder / _HERE, State(term=state.term, files={**rest, **wanted}).dump())
        return state, stored.tag if stored else ""
    raise AssertionError("the last trial returns or raises")


def _loaded(content: bytes, where: str) -> State:
    try:
        return State.load(content)
    except ValueError as error:
        advice = "it is of another version of Serin: use the same one on all hosts"
        raise FileBroken(path=where, problem=str(error), advice=advice) from error


def _read(objects: Objects, prefix: str, place: str) -> bytes | None:
    stored = objects.read(f"{prefix}/files/{place}")
    if stored is None or not place.endswith(hashlib.sha256(stored.content).hexdigest()):
        return None
    return stored.content


def _remove(path: Path) -> None:
    """Removes a file; of a database also what belongs to it, which would be taken for a part of the next one."""
    path.unlink(missing_ok=True)
    if path.suffix == _DATABASE:
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def _files(folder: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for top in folders:
        for path in sorted((folder / top).rglob("*")):
            name = path.name
            other = name.startswith(".") or name == "lock" or name.endswith(("-wal", "-shm", ".lock"))
            if not other and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _signature(path: Path) -> Signature:
    """Changes when the file does."""
    names = [path, path.with_name(f"{path.name}-wal")] if path.suffix == _DATABASE else [path]
    found = [each.stat() for each in names if each == path or each.exists()]
    return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)


def _content(path: Path) -> bytes:
    """The bytes of a file; of a database, those of one moment of it."""
    if path.suffix != _DATABASE:
        return path.read_bytes()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".copy-")
    os.close(handle)
    try:
        with (
            contextlib.closing(sqlite3.connect(path)) as source,
            contextlib.closing(sqlite3.connect(name)) as copy,
        ):
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # a reader makes no further files
        return Path(name).read_bytes()
    finally:
        Path(name).unlink()
