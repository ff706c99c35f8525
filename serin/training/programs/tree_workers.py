"""Grows trees on several GPUs: Dask starts one worker for each, and XGBoost adds up their histograms.

A worker has an equal stretch of the rows and runs the same rounds as a single process (`grow_trees`). All of
them have the same trees after every round; the first one reports and saves. Does not import torch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from serin.errors import EngineFailed, Preempted
from serin.machine.dask_cluster import local_cluster
from serin.machine.hardware import inventory
from serin.machine.parent_death import die_with_parent
from serin.models.trees import load_xgboost
from serin.training.data.tree_matrix import Share
from serin.training.launch.job import read_job
from serin.training.programs.grow_trees import Team, grow_trees
from serin.training.results.tree_checkpoints import Grown

_LOOKED_AFTER_S = 0.2
_MEET_S = 300
_STOP = "stop-asked"
_DASK = {"distributed.scheduler.allowed-failures": 0}  # a lost worker ends the others' round: all begin again

_log = logging.getLogger(__name__)


def grow_on_workers(folder: Path, count: int, stop_asked: Callable[[], bool]) -> tuple[Grown, int]:
    """Returns the trees, and the round from which this attempt began. Raises the error of the first worker that
    fails."""
    stop = folder / _STOP
    stop.unlink(missing_ok=True)

    def look() -> None:
        if stop_asked():
            stop.touch()

    try:
        with local_cluster(count, settings=_DASK) as client:
            found = _grow(client, folder, count, look)
    except EngineFailed as error:
        raise RuntimeError(
            str(error)
        ) from error  # this process ends, and the next attempt begins another cluster
    stop.unlink(missing_ok=True)
    if isinstance(found, Preempted):
        raise found
    return found


def _grow(client: Any, folder: Path, count: int, look: Callable[[], object]) -> tuple[Grown, int] | Preempted:
    """Runs one task on each worker to its end, and calls `look` in between."""
    workers, ended = sorted(client.scheduler_info(n_workers=-1)["workers"]), threading.Event()
    with _meeting(count) as told:
        ranks = [
            client.submit(grow_share, str(folder), rank, count, told, workers=[workers[rank]], pure=False)
            for rank in range(count)
        ]
        for rank in ranks:
            rank.add_done_callback(lambda _: ended.set())
        while not all(rank.done() for rank in ranks):
            ended.wait(_LOOKED_AFTER_S)
            ended.clear()
            for rank in ranks:
                if rank.done():
                    rank.result()  # raises
            look()
        result: tuple[Grown, int] | Preempted = ranks[0].result()
    return result


@contextmanager
def _meeting(count: int) -> Iterator[dict[str, Any]]:
    """Yields what workers need to find each other. Frees XGBoost's tracker: its destructor would raise where a worker
    did not end in order."""
    from xgboost.core import XGBoostError
    from xgboost.tracker import RabitTracker

    tracker = RabitTracker(n_workers=count, host_ip="127.0.0.1", sortby="task", timeout=_MEET_S)
    try:
        tracker.start()
        yield tracker.worker_args()
    finally:
        try:
            tracker.free()
        except XGBoostError as error:
            _log.info("XGBoost's tracker: %s", error)


def grow_share(folder: str, rank: int, count: int, meeting: dict[str, Any]) -> tuple[Grown, int] | Preempted:
    """Runs on a worker: meets the others and grows the same trees from its own rows."""
    die_with_parent(os.getppid())
    load_xgboost()
    from xgboost import collective

    def agree(flag: bool) -> bool:
        return bool(collective.allreduce(np.array([flag], np.int32), collective.Op.MAX)[0])

    job, gpus = read_job(Path(folder)), max(1, len(inventory()))
    team = Team(
        share=Share(index=rank, count=count),
        device=f"cuda:{rank % gpus}" if job.gpu else "cpu",
        agree=agree,
    )
    stop = Path(folder) / _STOP
    collective.init(**meeting, dmlc_task_id=f"{rank:06d}")
    try:
        found: tuple[Grown, int] | Preempted = grow_trees(job, Path(folder), stop.exists, team)
    except Preempted as stopped:  # all of them together
        found = stopped
    collective.finalize()  # not after an error: it would wait for the others
    return found
