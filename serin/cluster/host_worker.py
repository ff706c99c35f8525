"""A Prefect worker on a host that has no stack: how it is started, and what it reports to the store.

Everything a run needs comes from outside: PREFECT_API_URL with its credentials, and SERIN_STORE.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from serin.errors import SpecError, StoreError
from serin.formats.cluster.host_report import WorkerReport, worker_key
from serin.machine import environment
from serin.machine.durable import make_private
from serin.machine.environment import application_folder
from serin.machine.hardware import core_count
from serin.prefect.processes import WORKER_TYPE, prefect_environment
from serin.store.objects import Objects
from serin.store.stage_results import shared_objects

logger = logging.getLogger(__name__)


def worker_command(home: Path, pool: str, *, limit: int | None) -> tuple[list[str], dict[str, str], Path]:
    """Returns the command of the worker, its environment, and the folder to start it in."""
    url, store = environment.text("PREFECT_API_URL"), environment.shared_store_url()
    problems = []
    if url is None:
        problems.append(
            ("PREFECT_API_URL", "is not set; set it to the Prefect server's, such as http://HOST:4200/api")
        )
    if store is None:
        problems.append(
            ("SERIN_STORE", "is not set; set it to the store that all hosts share, such as s3://BUCKET")
        )
    if url is None or problems:
        raise SpecError(where="serin worker", problems=problems)
    make_private(home)
    folder = application_folder()
    command = [
        sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", pool, "--type", WORKER_TYPE,
        "--name", f"serin-{pool}-{environment.host()}", "--install-policy", "never",
        "--base-job-template", str(folder / "deployments" / f"{pool}-pool.json"),
        *(["--limit", str(limit)] if limit is not None else []),
    ]  # fmt: skip
    return command, prefect_environment(home, url, own=False), folder


class Reports:
    """Reports a worker to the store, when SERIN_STORE names one. A report that fails is left out."""

    def __init__(self, pool: str) -> None:
        self._pool, self._beat = pool, 0
        self._objects: Objects | None = shared_objects()
        self._host = environment.host()
        self._gone, self._writing = False, threading.Lock()

    @property
    def wanted(self) -> bool:
        return self._objects is not None

    def report(self, runs: Iterable[str]) -> None:
        if self._objects is None:
            return
        from serin.host.gpu_use import read_gpu_use  # here: most workers have no store that they share

        self._beat += 1
        report = WorkerReport(
            host=self._host,
            pool=self._pool,
            beat=self._beat,
            t=time.time(),
            cores=core_count(),
            memory_bytes=psutil.virtual_memory().total,
            gpus=tuple(use.to_json() for use in read_gpu_use(environment.home())),
            runs=tuple(runs),
        )
        with self._writing:
            if self._gone:
                return
            try:
                self._objects.put(worker_key(self._host, self._pool), report.dump())
            except (StoreError, OSError) as error:
                logger.warning("no report of this worker: %s", error)

    def leave(self) -> None:
        """A worker that is stopped is not silent: it is gone. A report that another thread writes comes before."""
        if self._objects is None:
            return
        with self._writing:
            self._gone = True
            try:
                self._objects.remove(worker_key(self._host, self._pool))
            except (StoreError, OSError) as error:
                logger.warning("the report of this worker stays: %s", error)
