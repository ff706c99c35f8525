"""Starts the Prefect part of a stack: database, server, workers, deployments.

The server's imports are the longest part of a start. Workers import beside them and wait for a file (`workers_gate`):
they must not take runs before those of an earlier stack are closed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from serin.errors import PrefectGone
from serin.host.logs import log_says, log_size
from serin.host.state import POOLS, Stack
from serin.host.supervisor import READY_S, Supervisor, wait_until_ready
from serin.host.wiring import worker_name
from serin.machine.process import Process
from serin.prefect import prepared, processes, rest_api
from serin.prefect.deploy import (
    apply_deployments,
    are_deployed,
    deployments_digest,
    make_pools,
    note_deployed,
    pool_template,
    worker_for,
)
from serin.prefect.login import stack_api
from serin.prefect.template import FAILURES, obtain_template

logger = logging.getLogger(__name__)

_WORKER_STARTED = " started!"

Result = TypeVar("Result")


def start_prefect(stack: Stack, *, when_it_answers: Callable[[], None]) -> None:
    """Starts the stack's own server, its workers and deployments, and waits for them.

    `when_it_answers` is called when the server answers: it starts what would have made the server slower.
    """
    assert stack.prefect_port is not None
    supervisor, home = Supervisor(stack.home), stack.home
    _begin_database(stack)
    server = processes.prefect_server(home, stack.prefect_port)
    logger.info(
        f"starting the Prefect server on port {stack.prefect_port}, and workers for the pools cpu and gpu"
    )
    workers_gate = processes.workers_gate(home)
    workers_gate.unlink(missing_ok=True)
    supervisor.start(server)
    marks = {pool: log_size(processes.worker_log(home, pool)) for pool in POOLS}
    for pool in POOLS:  # of the usual type; corrected when the server can be asked
        supervisor.start(processes.prefect_worker(stack, pool, template=pool_template(pool)))
    wait_until_ready(supervisor, server, lambda: rest_api.answers(stack.prefect_api_url))
    when_it_answers()
    if not prepared.is_prepared(home):
        prepared.note_prepared(home)
    ask = partial(_ask, supervisor, server)
    lost = ask(lambda: rest_api.close_lost_runs(stack_api(stack), POOLS))
    if lost:
        logger.info(
            f"runs that an earlier stack left unfinished are now marked as crashed: {', '.join(lost)}"
        )
    ask(lambda: make_pools(stack_api(stack)))
    workers = ask(lambda: _correct_workers(supervisor, stack))
    workers_gate.touch(mode=0o600)
    with ThreadPoolExecutor(max_workers=1) as side:
        settings = processes.prefect_environment(home, stack.prefect_api_url, own=True)
        if not are_deployed(home, deployments_digest()):
            logger.info("applying deployments")
        deploying = side.submit(ask, lambda: apply_deployments(stack, settings))
        _wait_for_workers(supervisor, workers, marks)
        logger.info(f"deployments: {', '.join(deploying.result())}")


def _ask(supervisor: Supervisor, server: Process, request: Callable[[], Result]) -> Result:
    """Returns what `request`, which may be repeated, returns: a server that is late is asked again while it runs."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            return request()
        except PrefectGone:
            if not supervisor.runs(server.name) or time.monotonic() > deadline:
                raise


def use_prefect(stack: Stack) -> None:
    """Starts workers for a server that the stack did not start, and applies the deployments there."""
    logger.info(f"using the Prefect server at {stack.prefect_api_url} (PREFECT_API_URL)")
    supervisor = Supervisor(stack.home)
    marks = {pool: log_size(processes.worker_log(stack.home, pool)) for pool in POOLS}
    processes.workers_gate(stack.home).touch(mode=0o600)
    workers = {pool: worker for pool in POOLS if (worker := worker_for(stack, pool))}
    for worker in workers.values():
        supervisor.start(worker)
    _wait_for_workers(supervisor, workers, marks)  # they create the pools that deployments need
    settings = processes.prefect_environment(stack.home, stack.prefect_api_url, own=False)
    logger.info(f"deployments: {', '.join(apply_deployments(stack, settings))}")


def _begin_database(stack: Stack) -> None:
    """Puts a prepared database into an empty state, and makes one for this user first if there is none that fits.

    Without one the server makes its own, which takes longer.
    """
    if prepared.database(stack.home).exists():
        return
    digest = deployments_digest()
    copied = prepared.copy_template(stack.home, digest)
    if copied is None:
        try:
            obtain_template()
        except FAILURES as error:
            logger.info(f"the server prepares its database itself: {error}")
            return
        copied = prepared.copy_template(stack.home, digest)
    if copied == "whole":
        note_deployed(stack.home, digest)


def _correct_workers(supervisor: Supervisor, stack: Stack) -> dict[str, Process]:
    """Returns the workers by pool, of the types that the pools have; one whose runs start elsewhere is stopped."""
    found = {}
    for pool in POOLS:
        worker = worker_for(stack, pool)
        if worker is None:
            supervisor.stop(worker_name(pool))
        else:
            supervisor.start(worker)
            found[pool] = worker
    return found


def _wait_for_workers(supervisor: Supervisor, workers: dict[str, Process], marks: dict[str, int]) -> None:
    for pool, worker in workers.items():
        wait_until_ready(supervisor, worker, partial(log_says, worker.log, marks[pool], _WORKER_STARTED))
