"""The controller's process of one machine: `python -m serin.cluster.home_controller`.

A machine is a cluster of one host. Its controller and its agent are those of several hosts, and meet in the home's
objects; here one loop runs both, so that neither waits for the other. It needs no clean exit: supervisord restarts it
after a crash, and it resumes from its journals.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

from serin.cluster.agent.agent import Agent
from serin.cluster.agent.link import Link
from serin.cluster.agent.replays import Replays
from serin.cluster.agent.settings import AgentSettings
from serin.cluster.controller import TICK_S, LedController
from serin.formats.serving.journal import DecisionCache
from serin.host.standing import run_standing
from serin.host.windows import apply_plans
from serin.host.wiring import CONTROLLER, build_gateway, build_releases, keep_ticking, request_log
from serin.machine.in_memory import socket_folder, write_problems
from serin.machine.ports import LOOPBACK
from serin.rollout.run.background import BackgroundFleet
from serin.rollout.run.leadership import HomeLock
from serin.rollout.run.verification import FOREIGN
from serin.serving.envoy.gateway import Gateway
from serin.store.home_objects import HomeObjects
from serin.store.store import Store

log = logging.getLogger("serin.cluster.home_controller")  # not __name__, which is __main__ here

HOST: Final = "localhost"


class OnlyHost:
    """The agent of this machine. `fleet` runs its releases."""

    def __init__(self, home: Path, objects: HomeObjects, gateway: Gateway, fleet: BackgroundFleet) -> None:
        folder, self._replays = socket_folder(home) / "agent", Replays(home, HOST, fleet.endpoint)
        self._link = Link(
            HOST, lambda: objects, folder=folder, request_log=request_log(home), replays=self._replays
        )
        settings = AgentSettings(host=HOST, address=LOOPBACK, port=0, advertise=LOOPBACK)
        self._agent = Agent(
            settings, gateway=gateway, fleet=fleet, link=self._link, windows=partial(apply_plans, home)
        )
        self._trouble = ""

    def step(self) -> bool:
        """Does what is desired, and reports it. Returns whether it is in force. What keeps it from that is logged: the
        controller must answer and go back also while, say, no evidence can be counted."""
        try:
            self._link.receive()
            report = self._agent.tick()
            self._link.send()
        except FOREIGN as error:
            if str(error) != self._trouble:
                log.warning("the agent of this machine: %s", error)
            self._trouble = str(error)
            return False
        self._trouble = ""
        return self._link.desired is None or report.desired_seq == self._link.desired.seq

    def wait(self, seconds: float) -> None:
        """Steps; waits only for what did not take effect at once."""
        if not self.step():
            time.sleep(seconds)

    def close(self) -> None:
        self._replays.close()


def run(home: Path, stop: threading.Event) -> None:
    """Ticks until `stop` is set. Raises JournalHeld while another process decides in this home, and LeadershipLost when
    one has."""
    with HomeLock(home) as leadership:
        _run(home, leadership, stop)


def _run(home: Path, leadership: HomeLock, stop: threading.Event) -> None:
    objects, store, gateway = HomeObjects(home), Store.open(), build_gateway(home)
    releases = BackgroundFleet(build_releases(home), threads=1)  # the supervisor gets one change at a time
    host = OnlyHost(home, objects, gateway, releases)
    controller = LedController(
        leadership.term,
        DecisionCache(objects),
        objects=objects,
        store=store,
        leadership=leadership,
        fleet="agents",
        wait=host.wait,
    )
    log.info("the controller has started")
    reported = dict[str, str]()
    with contextlib.suppress(OSError):
        write_problems(home, CONTROLLER, reported)  # an earlier controller's are not this one's

    def tick() -> None:
        nonlocal reported
        host.step()
        controller.tick()
        if controller.problems != reported:
            write_problems(home, CONTROLLER, controller.problems)
            reported = dict(controller.problems)

    try:
        keep_ticking(tick, gateway, stop, every_s=TICK_S)
    finally:
        controller.close()
        host.close()
        releases.close()
    log.info("the controller has stopped")


def main() -> None:
    run_standing("the controller", run, asks_store=True)


if __name__ == "__main__":
    main()
