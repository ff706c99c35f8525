"""The objects by which the stack of one machine is controlled: files of its home, and of its folder in memory.

What must not wait for a disk that takes no more is kept in memory instead, and counts from then on: commands and
answers (`put`), and decisions that go back to the live release (`keep`). What the only host is to run and reports is in
memory alone, and ends with the stack; where memory is full as well, this process knows it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from serin.errors import ObjectChanged, ObjectExists
from serin.machine.in_memory import OBJECTS, VOLATILE, memory_folder
from serin.store.objects import FolderObjects, Stored, tag_of

_VOLATILE: Final = tuple(f"{VOLATILE}/{name}/" for name in ("desired", "evidence", "hosts", "replays"))


class HomeObjects(FolderObjects):
    """Objects of the home and of its folder in memory; where both have one, the home's is right."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._home = home
        self._unwritten: dict[str, bytes] = {}  # volatile ones that memory did not take

    def read(self, key: str) -> Stored | None:
        if (content := self._unwritten.get(key)) is not None:
            return Stored(content=content, tag=tag_of(content))
        memory = self._memory()
        return super().read(key) or (memory.read(key) if memory else None)

    def create(self, key: str, content: bytes) -> str:
        if not key.startswith(_VOLATILE):
            return super().create(key, content)
        if self.read(key) is not None:
            raise ObjectExists(key=key, url=self.url)
        return self._write_volatile(key, content)

    def replace(self, key: str, content: bytes, tag: str) -> str:
        if not key.startswith(_VOLATILE):
            return super().replace(key, content, tag)
        if (found := self.read(key)) is None or found.tag != tag:
            raise ObjectChanged(key=key, url=self.url)
        return self._write_volatile(key, content)

    def _write_volatile(self, key: str, content: bytes) -> str:
        self._unwritten[key] = content
        if self.keep(key, content):
            del self._unwritten[key]
        return tag_of(content)

    def put(self, key: str, content: bytes) -> None:
        if key.startswith(_VOLATILE):
            self._write_volatile(key, content)
            return
        try:
            super().put(key, content)
        except OSError:
            if not self.keep(key, content):
                raise

    def keep(self, key: str, content: bytes) -> bool:
        """Writes an object in memory alone; False where no stack was started, or memory is full as well."""
        memory = self._memory()
        with suppress(OSError):
            if memory is not None:
                memory.put(key, content)
                return True
        return False

    def drop(self, key: str) -> None:
        """Removes an object from memory: the home has it."""
        memory = self._memory()
        with suppress(OSError):
            if memory is not None:
                memory.remove(key)

    def keys(self, prefix: str, *, after: str = "") -> list[str]:
        memory = self._memory()
        kept = memory.keys(prefix, after=after) if memory else []
        unwritten = (key for key in self._unwritten if key.startswith(prefix) and key > after)
        return sorted({*super().keys(prefix, after=after), *kept, *unwritten})

    def remove(self, key: str) -> None:
        self._unwritten.pop(key, None)
        self.drop(key)
        super().remove(key)

    def on_disk(self) -> FolderObjects:
        return FolderObjects(self._home)

    def _memory(self) -> FolderObjects | None:
        folder = memory_folder(self._home)
        return None if folder is None else FolderObjects(folder / OBJECTS)
