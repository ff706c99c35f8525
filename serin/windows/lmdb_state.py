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
from serin.windows.ring import expires_at
from serin.windows.state import Change

SYNC_S: Final = 1.0
_MAP_BYTES: Final = 1 << 40  # of addresses, not of memory or disk
_SWEPT_KEYS: Final = 2_000  # in one transaction, so that requests do not wait for a sweep
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_OPEN: Final = "open"
DATA: Final = "data.mdb"


class LmdbState:
    """`moved`: where an earlier state was put that may be damaged; None: nowhere."""

    def __init__(self, folder: Path) -> None:
        self.moved = _move_if_damaged(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / _OPEN).write_text(_boot())
        self._folder, self._stop = folder, threading.Event()
        with _mapped():
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
        dropped, place = 0, b""
        while True:
            with _mapped(), self._env.begin(write=True, buffers=True) as work, work.cursor() as cursor:
                found = cursor.set_range(place) if place else cursor.first()
                for _ in range(_SWEPT_KEYS):
                    if not found:
                        return dropped
                    if expires_at(cursor.value()) < now_us:
                        dropped += cursor.delete()
                        found = bool(cursor.key())  # of the next one; empty after the last
                    else:
                        found = cursor.next()
                if not found:
                    return dropped
                place = bytes(cursor.key())

    def size(self) -> tuple[int, int]:
        with _mapped():
            stat = self._env.stat()
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return stat["entries"], pages * stat["psize"]

    def close(self) -> None:
        self._stop.set()
        self._sync.join()
        with _mapped():
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
        before = (folder / _OPEN).read_text()
    except FileNotFoundError:
        return None
    if before == _boot():
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
