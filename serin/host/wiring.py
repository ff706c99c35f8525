"""Builds the parts of serving for one home; `up`, `down`, the controller and the command all use these functions."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from serin.errors import SerinError
from serin.host.standing import stack_environment, standing_process
from serin.host.state import Stack, write_stack
from serin.host.supervisor import Supervisor
from serin.machine import environment
from serin.machine.in_memory import socket_folder
from serin.machine.ports import LOOPBACK
from serin.machine.process import Process, start_ticks
from serin.serving.envoy.gateway import Gateway
from serin.serving.envoy.keys import KeyFile
from serin.serving.triton.process import TritonPorts, reclaim_shared_memory

if TYPE_CHECKING:
    from serin.host.console import ConsolePlace
    from serin.serving.triton.releases import Releases
    from serin.store.store import Store

logger = logging.getLogger(__name__)

CONTROLLER, WATCHER, CONSOLE, AGENT = "controller", "watcher", "console", "agent"
PREFECT, RECONCILER = "prefect", "reconciler"


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


def follow_files(gateway: Gateway) -> None:
    """Applies keys and certificates that changed on disk, also while Envoy was away; opens a public port that was
    taken."""
    for follow in (gateway.follow_listener, gateway.follow_keys, gateway.tls.follow, gateway.peer_tls.follow):
        try:
            follow()
        except (OSError, SerinError) as error:
            logger.warning("cannot apply the gateway's keys and certificates: %s", error)


def key_file(home: Path) -> KeyFile:
    return KeyFile(path=home / "keys.json", published=home / "gateway" / "keys" / "keys.json")


def build_releases(home: Path, store: Store | None = None, host: Supervisor | None = None) -> Releases:
    """`store`: where versions come from; None: the store that this process is configured to use."""
    from serin.formats.serving.spool import spool_root
    from serin.formats.trust import Trust  # here: what starts the stack needs no releases
    from serin.serving.triton.releases import Releases
    from serin.store.store import Store

    return Releases(
        home / "releases",
        host=host or Supervisor(home),
        store=store or Store.open(),
        spool=spool_root(home),
        trust=Trust.open(),
    )


def controller_process(home: Path) -> Process:
    return standing_process(home, CONTROLLER, "serin.cluster.home_controller")


def agent_process(home: Path) -> Process:
    return standing_process(home, AGENT, "serin.cluster.agent.loop")


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


def launch_stack(
    home: Path,
    *,
    gateway_port: int,
    prefect_api_url: str,
    prefect_port: int | None,
    tls: bool,
    console: ConsolePlace | None = None,
    address: str = LOOPBACK,
    pages_port: int | None = None,
) -> Stack:
    """Launches the supervisor, still without processes, and records the stack."""
    pid = Supervisor(home).launch(stack_environment(home))
    stack = Stack(
        home=home,
        supervisor_pid=pid,
        supervisor_ticks=start_ticks(pid) or 0,
        gateway_port=gateway_port,
        prefect_api_url=prefect_api_url,
        prefect_port=prefect_port,
        since=time.time(),
        address=address,
        tls=tls,
        pages_port=pages_port,
        console_url=console.url if console else None,
        console_port=console.port if console else None,
    )
    write_stack(stack)
    return stack


def start_serving(stack: Stack) -> None:
    """Starts the controller and the console, beside the gateway."""
    supervisor = Supervisor(stack.home)
    supervisor.start(controller_process(stack.home))
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
