"""Makes files durable, also after a power cut, and folders private, whatever the umask says.

This is the only module that calls fsync for files and folders.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, Self

from serin.errors import StackUnusable

_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_WORTH_BYTES = 2**20
_SYNCS_AT_ONCE = 16  # a disk takes several at the price of one
_beside = ThreadPoolExecutor(4, thread_name_prefix="begin-sync")  # its threads start when they are needed
_ANOTHER: Final = "run `serin down`, remove it, and `serin up` makes another"
_SYNC_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
if _SYNC_RANGE is not None:
    _SYNC_RANGE.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def sync(path: Path) -> None:
    """Syncs a file's bytes, or the names in a folder (new ones, renamed ones), to disk before it returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_sync(descriptor: int, begin: int, end: int) -> None:
    """Starts writing these bytes of an open file to disk without waiting: a later `sync` has less to wait for.

    Few bytes are left to it.
    """
    if _SYNC_RANGE is not None and end - begin >= _WORTH_BYTES:
        _SYNC_RANGE(descriptor, begin, end - begin, _WRITE)


def begin_sync_beside(path: Path) -> None:
    """`begin_sync` of a whole file by another thread: a busy disk does not hold up the caller.

    It reports no errors: those are left to the `sync` that has to follow.
    """
    if _SYNC_RANGE is not None:
        _beside.submit(_begin_sync_of, path)


def _begin_sync_of(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        begin_sync(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)


class Syncs:
    """Syncs files and folders in the background until `wait` is called. Use it as a context manager."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_SYNCS_AT_ONCE, thread_name_prefix="sync")
        self._waiting: list[Future[None]] = []  # appending is safe from any thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def add(self, *paths: Path) -> None:
        """Syncs these, one after the other."""
        self._waiting.append(self._threads.submit(_sync_all, paths))

    def wait(self) -> None:
        """Returns when all that was added is on the disk; raises what a sync raised."""
        while self._waiting:
            self._waiting.pop().result()

    def drop(self) -> None:
        """Forgets what was added: its files are to be removed."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.cancel()
        wait(waiting)


def _sync_all(paths: Sequence[Path]) -> None:
    for path in paths:
        sync(path)


def write_whole(path: Path, data: str | bytes) -> None:
    """Writes a file atomically: `path` has either its old content or all of `data`, durably once this returns."""
    with replacing(path) as scratch:
        scratch.write_bytes(data.encode() if isinstance(data, str) else data)
        sync(scratch)
    sync(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`: it takes the place of `path` when the block ends well, and is removed if not."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")  # several machines may write the same
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_secret(path: Path, text: str) -> None:
    """Writes like `write_whole`, and never readable by others, not for a moment."""
    with _secret_scratch(path, text) as scratch:
        scratch.rename(path)
    sync(path.parent)


def create_secret(path: Path, text: str) -> None:
    """Writes like `write_secret`, but keeps an existing file: two concurrent callers find the same content."""
    with _secret_scratch(path, text) as scratch, contextlib.suppress(FileExistsError):
        os.link(scratch, path)
    sync(path.parent)


def own_secret(path: Path, prefix: str = "") -> str:
    """Returns the secret in a file that only its owner can read. Where there is none, one that begins with `prefix` is
    created; two concurrent calls get the same."""
    for _ in range(2):
        try:
            mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            make_private(path.parent)
            create_secret(path, f"{prefix}{secrets.token_urlsafe(32)}\n")
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise StackUnusable(problem=f"{path} cannot be read: {error}; {_ANOTHER}") from error
        if mode & 0o077:
            raise StackUnusable(problem=f"{path} can be read by others; {_ANOTHER}")
        if len(text) < 32 or not text.startswith(prefix):
            raise StackUnusable(problem=f"{path} contains no secret; {_ANOTHER}")
        return text
    raise StackUnusable(problem=f"{path} disappears as soon as it is written")


@contextlib.contextmanager
def _secret_scratch(path: Path, text: str) -> Iterator[Path]:
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


def file_signature(path: Path) -> tuple[int, ...] | None:
    """Returns a value that changes with every change of the file; None when there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def make_private(folder: Path) -> Path:
    """The folder, closed to other users when it is made here. One that exists keeps its mode: its owner may have opened
    it on purpose."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder
