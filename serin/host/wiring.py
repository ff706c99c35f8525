"""Builds the parts of serving for one home; `up`, `down`, the controller and the command all use these functions."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from serin.errors import KeyFileBroken, LeadershipLost, ProcessFailed, SerinError
from serin.host.standing import stack_environment, standing_process
from serin.host.state import Stack, write_stack
from serin.host.supervisor import Supervisor
from serin.machine import environment
from serin.machine.heartbeat import beat
from serin.machine.in_memory import socket_folder
from serin.machine.ports import LOOPBACK
from serin.machine.process import Process, start_ticks
from serin.serving.envoy.gateway import Gateway
from serin.serving.envoy.keys import KeyFile
from serin.serving.envoy.rings import NO_RINGS
from serin.serving.triton.installation import NO_FILTER, find_request_filter
from serin.serving.triton.process import TritonPorts, reclaim_shared_memory

if TYPE_CHECKING:
    from serin.serving.envoy.gateway import PeerPort
    from serin.serving.envoy.pages import Pages
    from serin.serving.envoy.tls import TlsFiles
    from serin.serving.triton.releases import Releases
    from serin.store.store import Store

logger = logging.getLogger(__name__)

CONTROLLER, WATCHER, CONSOLE, AGENT = "controller", "watcher", "console", "agent"
PREFECT, RECONCILER = "prefect", "reconciler"

_LOG_LIMIT_BYTES: Final = 256_000_000
_ROTATE_EVERY_S: Final = 60.0
_LOOK_S: Final = 1.0


def worker_name(pool: str) -> str:
    """Returns the name of a worker's process in the stack."""
    return f"worker-{pool}"


def request_log(home: Path) -> Path:
    return home / "gateway" / "requests.jsonl"


def build_gateway(home: Path) -> Gateway:
    return Gateway(
        home / "gateway",
        admin=socket_folder(home) / "envoy.sock",
        log=request_log(home),
        keys=key_file(home).path,
        max_heap_bytes=environment.gateway_memory_bytes(),
    )


def prepare_gateway(
    home: Path,
    port: int,
    address: str,
    *,
    tls: TlsFiles | None,
    expert: Path | None,
    pages: Pages | None = None,
    peers: PeerPort | None = None,
) -> str:
    """Write the settings that the gateway starts with and log what keeps clients away from it. Return the address on
    which clients reach it: without the request filter only this machine's."""
    request_filter, gateway = find_request_filter(), build_gateway(home)
    gateway.write_bootstrap(
        port, address, tls=tls, expert=expert, request_filter=request_filter, pages=pages, peers=peers
    )
    unrecorded = None if gateway.ring_settings() else NO_RINGS.format(folder=gateway.rings.parent)
    for problem in (unrecorded if request_filter else NO_FILTER, key_trouble(home)):
        if problem:
            logger.info(problem)
    return address if request_filter else LOOPBACK


def key_trouble(home: Path) -> str | None:
    """Returns why the gateway is closed and what to do; None when the keys can be read."""
    try:
        key_file(home).read()
    except KeyFileBroken as error:
        return str(error)
    return None


def keep_ticking(
    tick: Callable[[], None],
    gateway: Gateway,
    stop: threading.Event,
    *,
    every_s: float,
    wait: Callable[[float], object] | None = None,
) -> None:
    """Tick until `stop` is set, and look after the gateway: its logs, keys and certificates. A tick that fails is
    repeated: a decision that could not be recorded was not made. `wait`: how to wait for the next tick."""
    rotate_at = 0.0
    while not stop.is_set():
        beat()
        began = time.monotonic()
        try:
            tick()
            if began >= rotate_at:
                gateway.rotate_logs(_LOG_LIMIT_BYTES)
                rotate_at = began + _ROTATE_EVERY_S
        except LeadershipLost:
            raise  # the next process begins with what was decided
        except (OSError, SerinError) as error:
            logger.warning("this tick failed: %s", error)
        _follow_files(gateway)
        (wait or stop.wait)(max(0.0, every_s - (time.monotonic() - began)))


def _follow_files(gateway: Gateway) -> None:
    """Applies keys and certificates that changed on disk, also while Envoy was away; opens a public port that was
    taken."""
    for follow in (gateway.follow_listener, gateway.keys.follow, gateway.tls.follow, gateway.peer_tls.follow):
        try:
            follow()
        except (OSError, SerinError) as error:
            logger.warning("cannot apply the gateway's keys and certificates: %s", error)


def key_file(home: Path) -> KeyFile:
    return KeyFile(path=home / "keys.json", published=home / "gateway" / "keys" / "keys.json")


def build_releases(home: Path, store: Store | None = None) -> Releases:
    """`store`: where versions come from; None: the store that this process is configured to use."""
    from serin.serving.triton.releases import Releases
    from serin.store.store import Store
    from serin.store.trust import Trust  # here: what starts the stack needs no releases

    return Releases(
        home / "releases",
        host=Supervisor(home),
        store=store or Store.open(),
        trust=Trust.open(),
    )


def controller_process(home: Path) -> Process:
    return standing_process(home, CONTROLLER, "serin.cluster.home_controller")


def watcher_process(home: Path, *, owns_prefect: bool) -> Process:
    """It sends events to Prefect, so it has the caller's credentials where the server is not the stack's own."""
    credentials = {} if owns_prefect else environment.prefect_credentials()
    return standing_process(
        home, WATCHER, "serin.watcher.watcher", {**stack_environment(home), **credentials}
    )


def console_socket(home: Path) -> Path:
    """Where the gateway reaches the console: only the owner of the stack can open it."""
    return socket_folder(home) / "console.sock"


def console_process(home: Path) -> Process:
    return standing_process(home, CONSOLE, "serin.console.server")


def launch_stack(planned: Stack) -> Stack:
    """Launches the supervisor, still without processes, and records the stack."""
    pid = Supervisor(planned.home).launch(stack_environment(planned.home))
    stack = replace(planned, supervisor_pid=pid, supervisor_ticks=start_ticks(pid) or 0, since=time.time())
    write_stack(stack)
    return stack


def watch_supervisor(stack: Stack, stop: threading.Event) -> None:
    """Return once `stop` is set. Raise ProcessFailed when the supervisor exits before."""
    while not stop.wait(_LOOK_S):
        if not stack.is_alive:
            log = Supervisor(stack.home).log
            raise ProcessFailed(name="the supervisor", reason="it has exited", log=log)


def loop_process(stack: Stack) -> Process:
    """Returns the process that keeps releases and gateway as they should be: the agent of a host, or the controller of
    a machine, which is its agent as well."""
    if stack.agent:
        return standing_process(stack.home, AGENT, "serin.cluster.agent.loop")
    return controller_process(stack.home)


def start_serving(stack: Stack) -> None:
    """Starts what looks after the gateway, and the console."""
    supervisor = Supervisor(stack.home)
    supervisor.start(loop_process(stack))
    if stack.console_port is not None:
        supervisor.start(console_process(stack.home))


def start_watching(stack: Stack) -> None:
    """Starts the watcher, which nobody waits for: last, so that its imports delay nothing else."""
    Supervisor(stack.home).start(watcher_process(stack.home, owns_prefect=stack.owns_prefect))


def remove_shared_memory(home: Path) -> int:
    """Removes what this home's releases left in shared memory, when none of their processes lives; returns how much."""
    count = 0
    for record in (home / "releases").glob("*/release.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a record that a crash truncated
            place = TritonPorts.from_json(json.loads(record.read_text())["place"])
            count += reclaim_shared_memory(place)
    return count
