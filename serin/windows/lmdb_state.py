"""Keeps the events of keys in LMDB: one machine, one folder.

A transaction is in the kernel's memory when `update` returns, so that nothing is lost when this process is killed. It
is on the disk within `SYNC_S`. After a power failure LMDB files that were not on the disk may be damaged: a folder that
was last opened before this machine started, and was not closed since, is moved aside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import lmdb

from serin.errors import StateUnavailable
from serin.machine.durable import write_whole
from serin.windows.ring import expires_at
from serin.windows.state import Change

SYNC_S: Final = 1.0
_MAP_BYTES: Final = 1 << 40  # of addresses, not of memory or disk
_SWEPT_KEYS: Final = 100  # in one transaction: requests wait for it
_PAUSE_S: Final = 0.002  # between two, in which requests are answered
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_OPEN: Final = "open"
DATA: Final = "data.mdb"


class LmdbState:
    """`moved`: where an earlier state was put that may be damaged; None: nowhere."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stop, self._sweeping = folder, threading.Event(), threading.Lock()
        with _mapped():
            self.moved = _move_if_damaged(folder)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(folder / _OPEN, _boot())
            self._env = lmdb.open(
                str(folder), map_size=_MAP_BYTES, sync=False, mode=0o600, max_readers=16, metasync=False
            )
        self._sync = threading.Thread(target=self._keep_syncing, name="sync", daemon=True)
        self._sync.start()

    def update(self, keys: Sequence[bytes], change: Change) -> None:
        with _mapped(), self._env.begin(write=True) as work:
            for key, content in change({key: work.get(key) for key in keys}).items():
                if content is None:
                    work.delete(key)
                else:
                    work.put(key, content)

    def drop_expired(self, now_us: int) -> int:
        """A few keys at a time, so that requests do not wait; `close` ends it."""
        dropped = 0
        place: bytes | None = b""
        with self._sweeping:
            while place is not None and not self._stop.wait(_PAUSE_S):
                count, place = self._sweep(place, now_us)
                dropped += count
        return dropped

    def _sweep(self, place: bytes, now_us: int) -> tuple[int, bytes | None]:
        """How many keys were dropped from `place` on, and where to resume; None at the end."""
        dropped = 0
        with _mapped(), self._env.begin(write=True, buffers=True) as work, work.cursor() as cursor:
            found = cursor.set_range(place) if place else cursor.first()
            for _ in range(_SWEPT_KEYS):
                if not found:
                    break
                if expires_at(cursor.value()) < now_us:
                    dropped += cursor.delete()
                    found = bool(cursor.key())  # of the next one; empty after the last
                else:
                    found = cursor.next()
            return dropped, bytes(cursor.key()) if found else None

    def size(self) -> tuple[int, int]:
        with _mapped():
            stat = self._env.stat()
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return stat["entries"], pages * stat["psize"]

    def close(self) -> None:
        self._stop.set()
        self._sync.join()
        with _mapped(), self._sweeping:
            self._env.sync(True)
            self._env.close()
        (self._folder / _OPEN).unlink(missing_ok=True)

    def _keep_syncing(self) -> None:
        while not self._stop.wait(SYNC_S):
            with suppress(StateUnavailable), _mapped():  # a full disk: the next update says so
                self._env.sync(True)


def copy_state(folder: Path, target: Path) -> None:
    """Copies what is kept in `folder` to the empty folder `target`, also while another process writes it."""
    with _mapped(), lmdb.open(str(folder), map_size=_MAP_BYTES, readonly=True) as opened:
        opened.copy(str(target), compact=True)


def _move_if_damaged(folder: Path) -> Path | None:
    try:
        before = (folder / _OPEN).read_bytes()
    except FileNotFoundError:
        return None
    if before == _boot().encode():
        return None  # its process was killed, and the kernel was not
    aside = folder.with_name(f"{folder.name}-before-{int(time.time())}")
    folder.rename(aside)
    return aside


def _boot() -> str:
    return _BOOT.read_text().strip()


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise StateUnavailable(reason=str(error)) from error
