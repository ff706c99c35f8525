"""The process that computes online windows: `python -m serin.cluster.windows_step`. The supervisor restarts it."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Final

from serin.errors import StateUnavailable
from serin.host.standing import run_standing
from serin.host.state import read_stack
from serin.host.windows import plans_folder, shared_events, state_folder, windows_socket
from serin.machine import environment
from serin.machine.heartbeat import beat
from serin.machine.ports import is_loopback
from serin.serving.windows.server import serve
from serin.serving.windows.step import Step, sweep
from serin.windows.lmdb_state import LmdbState
from serin.windows.state import State

log = logging.getLogger("serin.cluster.windows_step")  # not __name__, which is __main__ here

_LOOK_S: Final = 0.2


def run(home: Path, stop: threading.Event) -> None:
    """Answers until `stop` is set."""
    step = Step(plans_folder(home), lambda: open_state(home))
    step.warm()
    ended = threading.Event()
    sweeper = threading.Thread(target=sweep, args=(step, ended), name="sweep", daemon=True)
    sweeper.start()
    try:
        asyncio.run(_serve(step, windows_socket(home), stop))
    finally:
        ended.set()
        step.close()
        sweeper.join()


def open_state(home: Path) -> State:
    """What keeps the events of this host. Raises StateUnavailable, also on one of several hosts without a shared place:
    windows over its own events alone would be wrong."""
    place, stack = shared_events(), read_stack(home)
    if place is not None:
        from serin.windows.valkey_state import ValkeyState  # here: one machine does not need its client

        if not place.tls and not is_loopback(place.host):
            log.warning("%s: passwords and events are not encrypted; use valkeys://", place)
        return ValkeyState(place, environment.store_url())
    if stack is not None and stack.agent:
        raise StateUnavailable(
            reason="this is one of several hosts; set SERIN_EVENTS to the Valkey that they share"
        )
    state = LmdbState(state_folder(home))
    if state.moved is not None:
        log.warning(
            "this machine went down while events were written: they may be damaged and were moved to %s; push or "
            "backfill them again (`serin events`)",
            state.moved,
        )
    return state


async def _serve(step: Step, socket: Path, stop: threading.Event) -> None:
    ended = asyncio.Event()
    serving = asyncio.create_task(serve(socket, step.answer, ended))
    while not stop.is_set() and not serving.done():
        beat()
        await asyncio.sleep(_LOOK_S)
    ended.set()
    await serving


def main() -> None:
    run_standing("the process of online windows", run)


if __name__ == "__main__":
    main()
