"""Die with the parent. torchrun gives each worker a session of its own, so a killed launcher would leave them running
on a GPU that the kernel has just given to somebody else."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec the loader's lock may be taken


def die_with_parent(parent: int) -> None:
    """SIGKILL this process as soon as `parent` is gone, also when it went before this call."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
