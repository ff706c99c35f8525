"""A Dask cluster of processes on this machine, for the ETL and for trees on several GPUs."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dask
import distributed

from serin.errors import EngineFailed

_LocalCluster: Any = distributed.LocalCluster
_Client: Any = distributed.Client
_log = logging.getLogger(__name__)
# Dask abandons a worker that died and is not back after 15 s, as on a busy machine. Work would wait forever once that
# has happened to all of them.
LOST_WORKERS_COME_BACK = {"distributed.deploy.lost-worker-timeout": "1 day"}


@contextmanager
def local_cluster(
    workers: int,
    worker_bytes: int | str = "auto",
    *,
    settings: Mapping[str, Any] = LOST_WORKERS_COME_BACK,
    closed: bool = True,
) -> Iterator[Any]:
    """A client of a cluster of processes on this machine, one thread each, reachable from this machine only. What
    workers put on disk is in a folder that only their owner may enter; Dask's own in /tmp is open to all users.

    `settings`: of Dask. `closed`: it accepts only this client, by certificates that are created for it and kept in
    memory. Anyone who may talk to a scheduler may run code on its workers, and any user of the machine can reach its
    port.

    EngineFailed when one of them died while it was started: later Dask starts another."""
    begun = done = False
    try:
        with (
            tempfile.TemporaryDirectory(prefix="serin-dask-", ignore_cleanup_errors=True) as folder,
            dask.config.set({**settings, "temporary-directory": folder}),
            _LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                memory_limit=worker_bytes,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # any free port; none at all is not offered
                silence_logs=logging.ERROR,
                security=closed or None,
            ) as cluster,
            _Client(cluster, set_as_default=False) as client,
        ):
            begun = True
            yield client
            done = True
    except RuntimeError as error:
        if begun:
            raise
        raise EngineFailed(engine="dask", reason=f"a worker died while it was started ({error})") from error
    except TimeoutError as error:
        if not done:
            raise
        _log.warning("the work is done, but the Dask cluster did not close in time (%s)", error)
