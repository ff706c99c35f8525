"""The frame of a training program that is one process: SIGTERM asks it to stop, status.json says how it ended."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from serin.errors import Preempted, SerinError
from serin.machine.parent_death import die_with_parent
from serin.training.launch.job import Status, TrainingJob, only_one, read_job, write_status
from serin.training.launch.progress import tell

FORMER_WORKER_ENDS_S = 60.0


def run_attempt(train: Callable[[TrainingJob, Path, threading.Event], Status]) -> None:
    """Calls `train` with the job of the folder that the launcher named, and ends the process. The arguments of the
    process are the folder and the id of its parent."""
    folder = Path(sys.argv[1])
    die_with_parent(int(sys.argv[2]))
    tell(folder, "imported")
    stop, job = set_by_sigterm(), read_job(folder)
    try:
        with only_one(folder / "worker.lock", wait_s=FORMER_WORKER_ENDS_S):
            status = train(job, folder, stop)
    except Preempted as stopped:
        status = Status(state="preempted", step=stopped.fields["step"])
    except SerinError as error:
        status = Status(state="refused", reason=str(error))
    write_status(folder, status)
    sys.exit({"done": 0, "preempted": Preempted.exit_code}.get(status.state, 1))


def set_by_sigterm() -> threading.Event:
    """Returns an event that SIGTERM sets from now on."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _signal, _frame: stop.set())
    return stop
