"""This process as if it had ended: nothing is held by it any more."""

import os

from serin.machine import in_use


def forget_own_locks() -> None:
    for file in in_use._held.values():
        os.close(file)
    in_use._held.clear()
