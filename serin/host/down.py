"""Takes the local stack down without leftovers: no process, socket or shared memory. Ends processes by pid only."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path

from serin.errors import FileBroken, NameInvalid, NotUp, ServingError, SupervisorGone
from serin.formats.serving.ring import remove_drained
from serin.host.process_scan import end_processes, group_members, record_folder, stack_processes
from serin.host.state import POOLS, Stack, changing_stack, read_stack, stack_file
from serin.host.supervisor import Supervisor
from serin.host.wiring import (
    AGENT,
    CONTROLLER,
    PREFECT,
    RECONCILER,
    build_gateway,
    remove_shared_memory,
    worker_name,
)
from serin.machine.in_memory import remove_sockets
from serin.machine.process import start_ticks
from serin.store.artifacts import Release

logger = logging.getLogger(__name__)

_DRAIN_S = 5.0  # or as long as a request may take
_RUN_S = 15.0  # a training saves in this time
_STOP_S = 30.0


def take_down(home: Path) -> None:
    """Ends the stack in `home` after answering requests in flight. Raises NotUp when there was nothing to end."""
    if not home.is_dir():
        raise NotUp(home=home)
    with changing_stack(home, wait_s=10.0):
        stack = _read_or_move_aside(home)
        alive = stack is not None and stack.is_alive
        if stack is not None and alive:
            _stop_in_order(stack)
        leftovers = clear_away(home)
        if not alive and not leftovers:
            raise NotUp(home=home)
        if not alive:
            logger.info(f"the stack had crashed; cleaned up {leftovers}")


def _read_or_move_aside(home: Path) -> Stack | None:
    """Returns the stack. A damaged file is kept under another name; the supervisor that runs still knows its pid."""
    try:
        return read_stack(home)
    except FileBroken as error:
        aside = stack_file(home).with_name(f"stack.json.broken-{time.time():.0f}")
        logger.info(f"{error.path} is damaged ({error.problem}); it is kept as {aside}")
        stack_file(home).rename(aside)
    try:
        pid = int(Supervisor(home).pid_file.read_text())
    except (OSError, ValueError):
        return None
    return Stack(home=home, supervisor_pid=pid, supervisor_ticks=start_ticks(pid) or -1, gateway_port=0)


def clear_away(home: Path) -> str:
    """Ends and removes everything that a stack in `home` left behind; returns a description, '' for nothing.

    stack.json is kept: the next stack uses the same ports, so that known addresses keep working.
    """
    found = []
    survivors = stack_processes(home)
    while survivors:
        found.append(f"{len(survivors)} process{'es' if len(survivors) > 1 else ''}")
        end_processes(survivors, grace_s=10.0)
        survivors = stack_processes(home)
    segments = remove_shared_memory(home)
    if segments:
        found.append(f"{segments} shared memory segment{'s' if segments > 1 else ''}")
    Supervisor(home).forget_programs()
    shutil.rmtree(record_folder(home), ignore_errors=True)
    if left := remove_drained(home):
        logger.info(
            f"requests that are not recorded yet stay in {left} rings in memory, for the next `serin up`"
        )
    sockets = remove_sockets(home)
    if sockets:
        found.append(f"{sockets} socket{'s' if sockets > 1 else ''}")
    return ", ".join(found)


def _stop_in_order(stack: Stack) -> None:
    """Stops decisions first, then new requests; answers requests in flight, lets runs report, then stops the rest."""
    supervisor = Supervisor(stack.home)
    try:
        supervisor.stop(RECONCILER)  # it would queue again the runs that are ended here
        for name in (AGENT, CONTROLLER):
            supervisor.stop(name)  # it would start again the releases that are stopped here
        names = [child.name for child in supervisor.children()]  # it may have removed a release at last
        releases = _releases(names)
        for name in (worker_name(pool) for pool in POOLS):
            if name in names:
                supervisor.request_stop(name)
        if releases or stack.agent:
            logger.info(f"draining {', '.join(release.name for release in releases) or 'the gateway'}")
            _drain(stack.home, releases)
        for name in names:
            if name not in (PREFECT, RECONCILER):
                supervisor.request_stop(name)
        _wait_until_stopped(supervisor, except_for={PREFECT})
        _end_runs(stack, supervisor.pid(PREFECT))
        supervisor.shut_down()
    except SupervisorGone:
        pass
    _wait_for_supervisor(stack)


def _end_runs(stack: Stack, server: int | None) -> None:
    """Ends runs that the workers started and that outlived them, while a server can still record how they ended."""
    keep = {stack.supervisor_pid, *(group_members(stack.home, server) if server else ())}
    runs = [pid for pid in stack_processes(stack.home) if pid not in keep]
    if runs:
        logger.info("ending unfinished runs")
        end_processes(runs, grace_s=_RUN_S)


def _wait_for_supervisor(stack: Stack) -> None:
    deadline = time.monotonic() + _STOP_S
    while stack.is_alive and time.monotonic() < deadline:
        time.sleep(0.05)


def _drain(home: Path, releases: list[Release]) -> None:
    gateway = build_gateway(home)
    deadline = time.monotonic() + max(_DRAIN_S, gateway.longest_request_s())
    with contextlib.suppress(ServingError):  # a gateway that has died has no requests
        gateway.close()
        while time.monotonic() < deadline and (
            gateway.requests_in_flight() or any(gateway.active_requests(release) for release in releases)
        ):
            time.sleep(0.05)


def _wait_until_stopped(supervisor: Supervisor, *, except_for: set[str]) -> None:
    deadline = time.monotonic() + _STOP_S
    while left := [
        child.name for child in supervisor.children() if child.pid and child.name not in except_for
    ]:
        if time.monotonic() > deadline:
            logger.info(f"{', '.join(left)} did not stop within {_STOP_S:.0f} s")
            return
        time.sleep(0.05)


def _releases(names: list[str]) -> list[Release]:
    found = []
    for name in names:
        with contextlib.suppress(NameInvalid):
            found.append(Release.parse(name))
    return found
