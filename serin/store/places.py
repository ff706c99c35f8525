"""Where a store keeps its folders and small files: the port that local.py and remote.py implement."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class Places(Protocol):
    def workspace_parent(self) -> Path:
        """Where folders are filled."""
        ...

    def working(self, name: str) -> AbstractContextManager[None]:
        """A folder in there is in use during the block."""
        ...

    def workspace_lock(self, name: str) -> Path:
        """What `working` holds."""
        ...

    def read(self, key: str) -> bytes | None: ...

    def write(self, key: str, content: bytes) -> None: ...

    def create(self, key: str, content: str = "") -> bool:
        """Takes a name for good; False when it is taken."""
        ...

    def change(self, key: str, change: Callable[[bytes | None], bytes]) -> None:
        """Replaces a file by what `change` makes of its content; of two at a time none is lost."""
        ...

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted."""
        ...

    def published(self, folder: str, *, marker: str) -> list[str]:
        """The names in a folder that are published folders, sorted."""
        ...

    def is_published(self, place: str, *, marker: str) -> bool: ...

    def publish(
        self, folder: Path, place: str, *, marker: str, lasting: Collection[Path], same: bool
    ) -> Path:
        """Makes a folder visible, at once and whole; returns it on a local path, where it is in use until this process
        ends. Another may have been published there first: it is returned, with `same` only if it is the same."""
        ...

    def fetch(self, place: str, *, marker: str, hold: bool) -> Path | None:
        """The published folder on a local path. `hold`: it is in use until this process ends."""
        ...

    def here(self, place: str, *, marker: str, hold: bool) -> Path | None:
        """The published folder if it is whole on this host; an object store is not asked."""
        ...

    def remove(self, place: str) -> None:
        """Takes a published folder away: its marker first, so that nobody reads half of it."""
        ...
