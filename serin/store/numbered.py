"""Objects that are numbered from 1 under a prefix, each written once: of several writers of a number one succeeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from serin.errors import ObjectExists, StoreUnreachable
from serin.store.objects import Objects, Stored

_THREADS = 8


def numbered_key(prefix: str, seq: int) -> str:
    return f"{prefix}{seq:012d}.json"


def numbers(objects: Objects, prefix: str, *, after: int = 0) -> list[int]:
    """Returns the numbers above `after`, sorted."""
    found = []
    for key in objects.keys(prefix, after=numbered_key(prefix, after) if after else ""):
        name = key.removeprefix(prefix).removesuffix(".json")
        if name.isdecimal():
            found.append(int(name))
    return found


def read_many(objects: Objects, keys: Sequence[str]) -> list[Stored | None]:
    """Reads several objects at the same time; None for one that is not there (any more)."""
    if len(keys) < 2:
        return [objects.read(key) for key in keys]
    with ThreadPoolExecutor(min(_THREADS, len(keys)), thread_name_prefix="read") as pool:
        return list(pool.map(objects.read, keys))


class NumberedWriter:
    """Writes the next number behind `seq`.

    A writer that was paused may find its number free again, because old objects are removed at some time. So a number
    counts as written only if no later one exists then.
    """

    def __init__(self, objects: Objects, prefix: str, seq: int) -> None:
        self._objects, self._prefix, self.seq = objects, prefix, seq
        self._doubt = False  # whether the next number may have been written without an answer

    def append(self, content: Callable[[int], bytes]) -> int:
        """Writes the next number with `content(number)` and returns it.

        Raises ObjectExists when the number, or a later one, was written by another process, or by this one without
        knowing: then nothing here is up to date any more. Raises StoreUnreachable when it is unknown whether it was
        written; the next call finds out.
        """
        seq = self.seq + 1
        key = numbered_key(self._prefix, seq)
        if self._doubt and self._objects.read(key) is not None:
            raise ObjectExists(key=key, url=self._objects.url)
        self._doubt = True
        self._create(key, content(seq))
        if self._objects.keys(self._prefix, after=key):
            raise ObjectExists(key=key, url=self._objects.url)
        self._doubt, self.seq = False, seq
        return seq

    def _create(self, key: str, content: bytes) -> None:
        try:
            self._objects.create(key, content)
        except StoreUnreachable:
            found = self._objects.read(key)
            if found is None:
                raise
            if found.content != content:
                raise ObjectExists(key=key, url=self._objects.url) from None
