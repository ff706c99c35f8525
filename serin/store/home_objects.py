"""The objects by which the stack of one machine is controlled: files of its home.

What must not wait for a disk that takes no more is kept in the stack's folder in memory instead, and counts from then
on: commands and answers (`put`), and decisions that go back to the live release (`keep`).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from serin.machine.in_memory import OBJECTS, memory_folder
from serin.store.objects import FolderObjects, Stored


class HomeObjects(FolderObjects):
    """Objects of the home and of its folder in memory; where both have one, the home's is right."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._home = home

    def read(self, key: str) -> Stored | None:
        memory = self._memory()
        return super().read(key) or (memory.read(key) if memory else None)

    def put(self, key: str, content: bytes) -> None:
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
        return sorted({*super().keys(prefix, after=after), *kept})

    def remove(self, key: str) -> None:
        self.drop(key)
        super().remove(key)

    def on_disk(self) -> FolderObjects:
        return FolderObjects(self._home)

    def _memory(self) -> FolderObjects | None:
        folder = memory_folder(self._home)
        return None if folder is None else FolderObjects(folder / OBJECTS)
