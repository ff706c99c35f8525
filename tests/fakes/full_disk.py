"""A disk that takes nothing more: every new file and every written byte under a folder fails as it does there."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def full_disk(folder: Path) -> Iterator[list[str]]:
    """Yields the paths that were refused. Removing and shortening files works, as on a real one."""
    refused: list[str] = []
    real_open, real_write, real_bytes = os.open, os.pwrite, Path.write_bytes

    def check(path: str | Path) -> None:
        if Path(path).is_relative_to(folder):
            refused.append(str(path))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):  # noqa: PTH110 (also bytes and descriptors)
            check(os.fsdecode(path))
        return real_open(path, flags, *rest, **named)

    def written(file: int, data: Any, place: int) -> int:
        check(os.readlink(f"/proc/self/fd/{file}"))  # noqa: PTH115
        return real_write(file, data, place)

    def whole(path: Path, data: Any) -> int:
        check(path)
        return real_bytes(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(os, "pwrite", written)
        patch.setattr(Path, "write_bytes", whole)
        yield refused
