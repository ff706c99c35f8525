"""Runs of scheduled scoring, each in its own process, that are killed at given moments.

    python -m tests.unit.pipeline.killed_score MODEL ROWS OUT WAITING MOMENT ...

Before each, the next folder of WAITING (empty: none) becomes one of those that ROWS, a glob, finds. A moment is a
number of changes to files: the process ends itself with SIGKILL before the next one. 0: it is not killed. After each
it prints the moment and whether it was killed, and the number of changes of a run that was not.
"""

import os
import signal
import sys
from pathlib import Path

import distributed as _dask  # noqa: F401  -- imported once, before the first fork

from serin.monitoring.capture import bulk as _records  # noqa: F401
from serin.pipeline.score import score_new
from serin.scoring import bulk as _bulk  # noqa: F401

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.truncate", "os.link")


def score(model: str, rows: str, out: str, moment: int) -> int:
    seen = 0

    def count(event: str, given: tuple[object, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in _CHANGES:
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    score_new(model, rows, out, workers=2)
    return seen


def main() -> None:
    model, rows, out, waiting, *moments = sys.argv[1:]
    arriving = iter(sorted(Path(waiting).iterdir()) if waiting else ())
    for moment in map(int, moments):
        if (arrived := next(arriving, None)) is not None:
            arrived.rename(Path(rows).parents[1] / arrived.name)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, str(score(model, rows, out, moment)).encode())
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or status == 0, f"exit status {status}"
        print(moment, killed, os.read(reader, 64).decode() or 0, flush=True)
        os.close(reader)


if __name__ == "__main__":
    main()
