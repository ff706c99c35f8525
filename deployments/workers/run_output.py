"""The file that takes the output of runs. A worker's own output is a pipe that breaks when the worker dies, which would
end the run."""

from __future__ import annotations

import os
from functools import partial
from typing import IO

from serin.machine import environment

LONGEST_BYTES = 10 << 20


def open_run_output() -> IO[bytes]:
    """Opens the log of runs; one that has become long is put aside first."""
    path = environment.home() / "logs" / "runs.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LONGEST_BYTES:
        path.replace(path.with_name("runs.log.1"))  # runs that have it open continue to write there
    return open(path, "ab", opener=partial(os.open, mode=0o600))
