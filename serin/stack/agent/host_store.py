"""The store as a host sees it that serves: versions that were fetched once are read without asking the store again."""

from __future__ import annotations

from serin.store.artifacts import Bundle
from serin.store.store import Store


class HostStore(Store):
    def bundle(self, model: str, version: int | str, *, hold: bool = False) -> Bundle:
        """Returns a version from the host's cache where it has it: versions never change, and a host must be able to
        start its releases while the store is away."""
        if isinstance(version, int) and (found := self.bundle_here(model, version, hold=hold)) is not None:
            return found
        return super().bundle(model, version, hold=hold)
