"""`serin agent` in the foreground: starts what runs on this host, or takes it over, and ends it on SIGTERM.

The supervisor, the gateway, the releases and the agent's loop do not depend on this process: after kill -9 the next one
finds them running and continues. systemd or Kubernetes runs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from serin.cluster.agent.evidence import evidence_prefix
from serin.cluster.agent.link import OwnReport, tag_file
from serin.cluster.agent.settings import AgentSettings
from serin.errors import AlreadyUp, ProcessFailed, SerinError, StoreError
from serin.formats.cluster.host_report import agent_key
from serin.host.console import NOT_INSTALLED, ConsolePlace, choose_place, is_installed, read_settings
from serin.host.down import clear_away, take_down
from serin.host.state import Stack, changing_stack, read_stack, write_stack
from serin.host.supervisor import Supervisor, wait_until_ready
from serin.host.wiring import (
    build_gateway,
    launch_stack,
    loop_process,
    prepare_gateway,
    start_serving,
    start_watching,
    watch_supervisor,
)
from serin.machine import environment
from serin.machine.durable import make_private
from serin.machine.ports import Claims
from serin.machine.process import start_ticks
from serin.serving.triton.installation import find_triton
from serin.store.open import StoreProbe, open_objects

log = logging.getLogger(__name__)

_END_S = 120.0
_STORE_S = 5.0


def run_agent(home: Path, settings: AgentSettings, stop: threading.Event) -> None:
    """Serves until `stop` is set. Raises ProcessFailed when the gateway does not start or the supervisor exits."""
    make_private(home)
    _end_other_settings(home, settings)
    if not settings.alone:
        _check_name(home, settings.host)
    with changing_stack(home):
        last = read_stack(home)
        stack = _take_over(last) if last is not None and last.is_alive else _start(home, settings, last)
    try:
        gateway, supervisor, loop = build_gateway(home), Supervisor(home), loop_process(stack)
        wait_until_ready(supervisor, gateway.process(), lambda: stop.is_set() or gateway.ready())
        wait_until_ready(supervisor, loop, lambda: stop.is_set() or supervisor.runs(loop.name))
        log.info("host %s: serving at %s", settings.host, settings.gateway_address)
        watch_supervisor(stack, stop)
        log.info("host %s: ending", settings.host)
    finally:
        take_down(home)
        if stop.is_set() and not settings.alone:
            _forget(settings.host)


def _check_name(home: Path, host: str) -> None:
    """Raises HostNameTaken if another agent reports under this name. A store that is away keeps no host from serving:
    the agent's loop looks again."""
    last, url = read_stack(home), environment.store_url()
    if last is not None and last.is_alive:  # its own loop reports
        return
    try:
        StoreProbe(url).check(_STORE_S)
        OwnReport(host, tag_file(home)).claim_at_last(open_objects(url))
    except StoreError as error:
        log.warning("whether another agent is called %s is not known yet: %s", host, error)


def _forget(host: str) -> None:
    """Removes what this host reported: it was stopped on purpose, so others take its place at once, and its silence
    does not hold rollouts."""
    try:
        url = environment.store_url()
        StoreProbe(url).check(_STORE_S)
        objects = open_objects(url)
        for key in (agent_key(host), *objects.keys(evidence_prefix(host))):
            objects.remove(key)
    except (OSError, SerinError) as error:
        log.warning("the report of host %s stays in the store (`serin hosts remove`): %s", host, error)


def end_agent(home: Path) -> bool:
    """Ends the `serin agent` of a home, which ends everything there; False when none runs."""
    stack = read_stack(home)
    pid = stack.agent_pid if stack is not None and stack.agent_is_alive else None
    if pid is None:
        return False
    began = start_ticks(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while began is not None and start_ticks(pid) == began:
        if time.monotonic() > deadline:
            reason = f"process {pid} does not exit"
            raise ProcessFailed(name="serin agent", reason=reason, log=Supervisor(home).log)
        time.sleep(0.05)
    return True


def _end_other_settings(home: Path, settings: AgentSettings) -> None:
    """Ends what an earlier agent left running, unless it was started with the same settings."""
    last = read_stack(home)
    if last is None or not last.is_alive:
        return
    if last.agent_pid is None or last.agent_is_alive:
        raise AlreadyUp(home=home, pid=last.agent_pid or last.supervisor_pid)
    if AgentSettings.read(home) != settings:
        log.info("the last agent here had other settings; ending what it left running")
        take_down(home)


def _take_over(last: Stack) -> Stack:
    stack = replace(last, agent_pid=os.getpid(), agent_ticks=start_ticks(os.getpid()) or 0)
    write_stack(stack)
    log.info("gateway and releases of an earlier agent run here; continuing with them")
    return stack


def _start(home: Path, settings: AgentSettings, last: Stack | None) -> Stack:
    if not settings.gateway_only:
        find_triton()
    clear_away(home)
    expert = Path(settings.envoy_file) if settings.envoy_file else None
    reached_on = prepare_gateway(
        home, settings.port, settings.address, tls=settings.tls, expert=expert, peers=settings.peers
    )
    if reached_on != settings.address:
        log.warning("clients reach this gateway on %s only", reached_on)
    if settings.peer_port is not None and settings.peer_files is None:
        log.warning("gateways use no TLS between them: anyone who can reach the peer port gets answers")
    settings.write(home)
    console = _console(last)
    stack = launch_stack(
        Stack(
            home=home,
            gateway_port=settings.port,
            prefect_api_url=environment.text("PREFECT_API_URL") or "",
            tls=settings.tls is not None,
            agent=not settings.alone,
            agent_pid=os.getpid(),
            agent_ticks=start_ticks(os.getpid()) or 0,
            console_url=console.url if console else None,
            console_port=console.port if console else None,
        )
    )
    Supervisor(home).start(build_gateway(home).process())
    start_serving(stack)
    start_watching(stack)
    return stack


def _console(last: Stack | None) -> ConsolePlace | None:
    """Returns the console's place when SERIN_CONSOLE names its settings: nobody reaches a port that was free by
    chance."""
    if environment.path("SERIN_CONSOLE") is None:
        return None
    if not is_installed():
        log.warning(NOT_INSTALLED)
        return None
    with Claims() as claims:
        return choose_place(read_settings(), claims, last=last.console_port if last else None)
