"""Where the gateway records requests: a ring in memory for each of its threads, as large as there is room for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LARGEST_BYTES: Final = 64 << 20
SMALLEST_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 4096
_FREE_SHARE: Final = 4  # a quarter of what is free, for all rings together


def ring_settings(folder: Path, threads: int) -> str:
    """Returns the setting of the request filter for rings in `folder`; empty where there is no room for them.

    The folder above must exist. The filter takes no folder that is not in memory.
    """
    place = os.statvfs(folder.parent)
    room = place.f_bavail * place.f_frsize // _FREE_SHARE // threads
    capacity = (min(LARGEST_BYTES, room) - _PAGE_BYTES) // 8 * 8
    return f"{capacity} {folder}" if capacity >= SMALLEST_BYTES - _PAGE_BYTES else ""
