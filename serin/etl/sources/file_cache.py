"""Caches work on single files for the next build; the content of a file alone decides its entry.

An entry is named by what it was made from, appears completely or not at all, and never changes; so a build with it
gives the same result as one without. `serin gc` removes entries that no build has used in a while.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serin.formats.dataset import SourceFile
from serin.machine.documents import canonical
from serin.machine.durable import replacing, sync
from serin.store.stage_keys import made_by


class FileCache:
    """The files that were converted, in a store's folder of what is kept; `found` and `made` count the requested ones.
    `digests` remembers what was hashed. With `again` no entry is believed: each is made once more."""

    def __init__(self, kept: Path, *, again: bool = False) -> None:
        self._folder, self.digests, self._again = kept / "converted", digests_in(kept), again
        self._lock = threading.Lock()
        self.found = 0
        self.made = 0

    def usable(self) -> bool:
        """Whether anything can be kept here."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        return os.access(self._folder, os.W_OK)

    def file(self, made_from: Any, make: Callable[[Path], None]) -> Path:
        """The entry made from this (anything JSON can say); `make` writes it to a path when it is not there."""
        path = self._folder / entry_name(made_from)
        if path.exists() and not self._again:
            path.touch()  # still of use
            self._count(found=1)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            make(temporary)
            sync(temporary)
        self._count(made=1)
        return path

    def _count(self, *, found: int = 0, made: int = 0) -> None:
        with self._lock:
            self.found += found
            self.made += made


def entry_name(made_from: Any) -> str:
    return hashlib.sha256(canonical(made_from)).hexdigest()


def conversion_of(file: SourceFile) -> Any:
    """What a converted file is made from: the file as it is, how it is written, and the code and libraries that read
    it."""
    options = [] if file.csv is None else [asdict(file.csv)]
    return ["converted", made_by("etl"), file.path, file.size, file.content, *options]


def digests_in(kept: Path) -> Path:
    """Where a store's folder of what is kept remembers the digests of files."""
    return kept / "digests"
