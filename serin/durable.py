"""What is on the disk stays there, also after a power cut: the one place that calls fsync for files and folders."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder (new ones, renamed ones), are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: str | bytes) -> None:
    """`path` holds either what it held before or all of `data`, and all of it once this returns."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")  # several machines may write the same
    try:
        scratch.write_bytes(data.encode() if isinstance(data, str) else data)
        sync(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    sync(path.parent)
