"""Where the gateway records requests: a ring in memory for each of its threads, as large as there is room for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LARGEST_BYTES: Final = 64 << 20
SMALLEST_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 4096
_FREE_SHARE: Final = 4  # a quarter of what is free there, for all rings together ...
_MEMORY_SHARE: Final = 16  # ... and no more of the memory that processes may have: rings count as theirs
NO_RINGS: Final = (
    "requests are not recorded: {folder} must be in memory, with 4 MB free for each thread of the gateway; give this "
    "machine or container a larger /dev/shm"
)


def ring_settings(folder: Path, threads: int, memory_bytes: int) -> str:
    """Returns the setting of the request filter for rings in `folder`; empty where there is no room for them in memory.

    The folder above must exist. `memory_bytes`: of this machine or container.
    """
    place = os.statvfs(folder.parent)
    room = min(place.f_bavail * place.f_frsize // _FREE_SHARE, memory_bytes // _MEMORY_SHARE) // threads
    capacity = (min(LARGEST_BYTES, room) - _PAGE_BYTES) // 8 * 8
    if capacity < SMALLEST_BYTES - _PAGE_BYTES or not _is_in_memory(folder.parent):
        return ""
    return f"{capacity} {folder}"


def _is_in_memory(folder: Path) -> bool:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0] in ("tmpfs", "ramfs")
    return False
