"""Folders that only their owner may enter: data, models, logs and caches are kept there, whatever the umask says."""

from __future__ import annotations

from pathlib import Path


def make_private(folder: Path) -> Path:
    """The folder, closed to other users when it is made here. One that exists keeps its mode: its owner may have opened
    it on purpose."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder
