"""Ties a process to its parent: the kernel kills it when the parent ends (PR_SET_PDEATHSIG, which exec keeps).

A process in its own session would survive otherwise, such as a training rank on a GPU that the kernel has just given to
another holder. Only the standard library is imported: host/exec_wrapper.py runs this file without site-packages.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec the loader's lock may be taken


def die_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when `parent` ends; exits now if it has ended before."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:
        sys.exit(f"the parent process ({parent}) has ended")
