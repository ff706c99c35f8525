"""The API keys and token issuers of all hosts: one object of the store, from which every agent copies its file.

    cluster/keys.json     a ring of keys as `<home>/keys.json` has it: hashes, no keys

As long as nobody has changed keys where several hosts share a store, there is none, and each host has its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from serin.errors import KeyFileBroken, ObjectChanged, ObjectExists
from serin.host.wiring import key_file
from serin.rollout.run.access import find_cluster
from serin.serving.envoy.keys import KeyFile, KeyRing
from serin.store.objects import Objects, swap

T = TypeVar("T")

KEY: Final = "cluster/keys.json"


class SharedKeys:
    """`file`: the copy of this host."""

    def __init__(self, objects: Objects, file: KeyFile) -> None:
        self._objects, self._file = objects, file

    def exist(self) -> bool:
        return self._objects.read(KEY) is not None

    def pull(self) -> tuple[str | None, bool]:
        """Copies the ring to this host if it is another one. Returns its tag (None: there is none), and whether it was
        copied. Raises KeyFileBroken for what is not a ring, and keeps the file."""
        stored = self._objects.read(KEY)
        if stored is None:
            return None, False
        try:
            ring = KeyRing.model_validate_json(stored.content)
        except ValueError as error:
            raise KeyFileBroken(path=f"{self._objects.url}/{KEY}", reason="is not a ring of keys") from error
        with self._file.locked():
            try:
                same = self._file.path.read_bytes() == stored.content
            except FileNotFoundError:
                same = False
            if not same:
                self._file.take(ring, stored.content)
        return stored.tag, not same

    def change(self, act: Callable[[KeyFile], T]) -> T:
        """Does something to the keys of all hosts. Raises StoreUnreachable when it may not have been done."""
        while True:
            tag, _ = self.pull()
            result = act(self._file)
            content = self._file.path.read_bytes()
            try:
                swap(self._objects, KEY, content, tag)
            except (ObjectChanged, ObjectExists):
                continue  # somebody else was faster: done again to what they have left
            return result


def current_keys(home: Path) -> KeyRing:
    """Returns the keys of this home, or of all hosts where they share some."""
    file = key_file(home)
    if (objects := find_cluster(home)) is not None:
        SharedKeys(objects, file).pull()
    return file.read()
