"""This process as if it had ended: nothing is held by it any more."""

import os

from serin.machine import locks


def forget_own_locks() -> None:
    for file in locks._held.values():
        os.close(file)
    locks._held.clear()
