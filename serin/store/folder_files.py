"""Files of a store in a folder, also one on a shared file system, by the same calls as those of an object store."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from serin.errors import ObjectChanged, ObjectExists
from serin.machine.durable import sync
from serin.store.objects import Entry, FolderObjects

_SCRATCH = re.compile(r"\..+\.[0-9a-f]{12}")  # not the locks beside objects


class FolderFiles(FolderObjects):
    def entries(self, prefix: str, *, after: str = "") -> list[Entry]:
        now, found = time.time(), []
        for key in self.keys(prefix, after=after):
            status = self._path(key).stat()
            found.append(Entry(key=key, size=status.st_size, age_s=now - status.st_mtime))
        return found

    def names(self, prefix: str) -> list[str]:
        folder = self._folder / prefix
        entries = folder.iterdir() if folder.is_dir() else ()
        return sorted(entry.name for entry in entries if not entry.name.startswith("."))

    def remove(self, key: str, *, tag: str | None = None) -> None:
        if tag is not None:
            found = self.read(key)
            if found is not None and found.tag != tag:
                raise ObjectChanged(key=key, url=self.url)
        super().remove(key)

    def create_file(self, key: str, path: Path) -> None:
        """Writes the file under a key that does not exist yet, else raises ObjectExists."""
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
        try:
            shutil.copyfile(path, scratch)
            sync(scratch)
            os.link(scratch, target)
        except FileExistsError:
            raise ObjectExists(key=key, url=self.url) from None
        finally:
            scratch.unlink(missing_ok=True)
        sync(target.parent)

    def upload(self, files: Mapping[str, Path]) -> None:
        for key, path in files.items():
            self._copy(path, self._path(key))

    def download(self, files: Mapping[str, Path]) -> None:
        for key, path in files.items():
            self._copy(self._path(key), path)

    def abandon_uploads(self, older_than_s: float, prefix: str = "") -> int:
        """Removes unfinished files of processes that were killed, of keys that begin with `prefix`; returns how
        many."""
        left = [path for path in (self._folder / prefix).rglob(".*") if _SCRATCH.fullmatch(path.name)]
        old = [path for path in left if time.time() - path.stat().st_mtime >= older_than_s]
        for path in old:
            path.unlink(missing_ok=True)
            sync(path.parent)
        return len(old)

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
        try:
            shutil.copyfile(source, scratch)
            sync(scratch)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
        sync(target.parent)
