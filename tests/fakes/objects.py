"""A store in memory, with conditional writes and, if asked for, failures."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from serin.errors import ObjectChanged, ObjectExists, StoreUnreachable
from serin.store.objects import Stored

T = TypeVar("T")


def calmly(_operation: str, _key: str) -> None:
    """Lets every operation happen."""


@dataclass
class MemoryObjects:
    """The content of a store. Clients of it may fail apart from each other (MemoryClient)."""

    url: str = "memory"
    content: dict[str, Stored] = field(default_factory=dict)
    created: list[tuple[str, bytes]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _writes: int = 0

    def read(self, key: str) -> Stored | None:
        return self.content.get(key)

    def create(self, key: str, content: bytes) -> str:
        with self.lock:
            found = self.content.get(key)
            if found is not None and found.content == content:
                return found.tag
            if found is not None:
                raise ObjectExists(key=key, url=self.url)
            self.created.append((key, content))
            return self._write(key, content)

    def replace(self, key: str, content: bytes, tag: str) -> str:
        with self.lock:
            found = self.content.get(key)
            if found is None or found.tag != tag:
                raise ObjectChanged(key=key, url=self.url)
            return self._write(key, content)

    def put(self, key: str, content: bytes) -> None:
        with self.lock:
            self._write(key, content)

    def keys(self, prefix: str, *, after: str = "") -> list[str]:
        with self.lock:
            return sorted(key for key in self.content if key.startswith(prefix) and key > after)

    def remove(self, key: str) -> None:
        with self.lock:
            self.content.pop(key, None)

    def _write(self, key: str, content: bytes) -> str:
        self._writes += 1
        self.content[key] = Stored(content=content, tag=f"tag-{self._writes}")
        return f"tag-{self._writes}"


@dataclass
class MemoryClient:
    """A process's way to the store. `before` is called before an operation, and `after` when it is done: either may
    raise, wait, or let other clients go first."""

    store: MemoryObjects
    before: Callable[[str, str], None] = calmly
    after: Callable[[str, str], None] = calmly

    @property
    def url(self) -> str:
        return self.store.url

    def read(self, key: str) -> Stored | None:
        return self._do("read", key, lambda: self.store.read(key))

    def create(self, key: str, content: bytes) -> str:
        return self._do("create", key, lambda: self.store.create(key, content))

    def replace(self, key: str, content: bytes, tag: str) -> str:
        return self._do("replace", key, lambda: self.store.replace(key, content, tag))

    def put(self, key: str, content: bytes) -> None:
        self._do("put", key, lambda: self.store.put(key, content))

    def keys(self, prefix: str, *, after: str = "") -> list[str]:
        return self._do("keys", prefix, lambda: self.store.keys(prefix, after=after))

    def remove(self, key: str) -> None:
        self._do("remove", key, lambda: self.store.remove(key))

    def _do(self, operation: str, key: str, action: Callable[[], T]) -> T:
        self.before(operation, key)
        result = action()
        self.after(operation, key)
        return result


def unreachable(url: str = "memory") -> StoreUnreachable:
    return StoreUnreachable(url=url, reason="the connection was lost")
