"""Where the events of keys are kept, behind one small interface, and what keeps them in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Change = Callable[[Mapping[bytes, bytes | None]], Mapping[bytes, bytes | None]]
"""From what is kept of some keys to what shall be kept of those that change; None: nothing."""


class State(Protocol):
    """Bytes by key. StateUnavailable when they cannot be read or written."""

    def update(self, keys: Sequence[bytes], change: Change) -> None:
        """Reads these keys, and stores what `change` makes of them, all or nothing. It survives the end of this process
        when this returns. `change` may be called again when another process changed a key in the meantime."""

    def drop_expired(self, now_us: int) -> int:
        """Drops what nothing can see any more; returns of how many keys."""

    def size(self) -> tuple[int, int]:
        """How many keys there are, and how many bytes they take."""

    def close(self) -> None: ...


class MemoryState:
    """Keeps everything in this process: for a replay, which nothing outlasts."""

    def __init__(self) -> None:
        self._kept: dict[bytes, bytes] = {}

    def update(self, keys: Sequence[bytes], change: Change) -> None:
        for key, content in change({key: self._kept.get(key) for key in keys}).items():
            if content is None:
                self._kept.pop(key, None)
            else:
                self._kept[key] = content

    def drop_expired(self, now_us: int) -> int:
        from serin.windows.ring import expires_at  # here: a state knows nothing else about what it keeps

        gone = [key for key, content in self._kept.items() if expires_at(content) < now_us]
        for key in gone:
            del self._kept[key]
        return len(gone)

    def size(self) -> tuple[int, int]:
        return len(self._kept), sum(len(key) + len(content) for key, content in self._kept.items())

    def close(self) -> None:
        self._kept.clear()
