"""The rollout controller's process: `python -m serin.cluster.home_controller`. Wires rollout to serving and ticks.

It needs no clean exit: supervisord restarts it after a crash, and it resumes from its journals.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from serin.cluster.combined_fleet import CombinedFleet, CombinedVersions
from serin.cluster.shadow.replayer import Replayer
from serin.cluster.version_settings import check_trusted, model_timeouts, stored_schema, stored_timeouts
from serin.errors import ReleaseNotReady
from serin.formats.serving.quality_evidence import read_quality_blocks
from serin.host.standing import run_standing
from serin.host.wiring import CONTROLLER, build_gateway, build_releases, keep_ticking, request_log
from serin.machine.in_memory import write_problems
from serin.rollout.run.background import BackgroundFleet
from serin.rollout.run.commands import Inbox
from serin.rollout.run.controller import Controller
from serin.rollout.run.journal import StoreJournals
from serin.rollout.run.judge import LogJudge
from serin.rollout.run.leadership import HomeLock
from serin.rollout.run.ports import Fleet
from serin.serving.envoy.gateway import Gateway
from serin.serving.envoy.routes import Timeouts
from serin.serving.external import External
from serin.store.artifacts import Endpoint, ModelRoute, Release
from serin.store.home_objects import HomeObjects
from serin.store.store import Store

log = logging.getLogger("serin.cluster.home_controller")  # not __name__, which is __main__ here

TICK_S = 0.5


class GatewayRouter:
    """The gateway as a rollout sees it: each route with the addresses and timeouts of its releases."""

    def __init__(self, gateway: Gateway, fleet: Fleet, timeouts: Callable[[Release], Timeouts]) -> None:
        self._gateway, self._fleet, self._timeouts = gateway, fleet, timeouts

    def apply(
        self, routes: Sequence[ModelRoute], *, waiting: Collection[str] = (), missing: Collection[str] = ()
    ) -> None:
        endpoints: dict[str, Endpoint] = {}
        for release in {release for route in routes for release in route.releases}:
            endpoints[release.name] = self._fleet.endpoint(release)
        for release in self._fleet.running():
            with contextlib.suppress(ReleaseNotReady):  # it is being started or stopped
                endpoints[release.name] = self._fleet.endpoint(release)
        running = list(map(Release.parse, endpoints))
        timeouts = {
            route.model: model_timeouts(
                self._timeouts,
                [*route.releases, *(release for release in running if release.model == route.model)],
            )
            for route in routes
            if route.releases
        }
        self._gateway.apply(routes, endpoints, timeouts, waiting=waiting, missing=missing)

    def active_requests(self, release: Release) -> int:
        return self._gateway.active_requests(release)


def run(home: Path, stop: threading.Event) -> None:
    """Ticks until `stop` is set. Raises JournalHeld while another process decides in this home, and LeadershipLost when
    one has."""
    with HomeLock(home) as leadership:
        _run(home, leadership, stop)


def _run(home: Path, leadership: HomeLock, stop: threading.Event) -> None:
    objects = HomeObjects(home)
    store, gateway, external = Store.open(), build_gateway(home), External(objects)
    ours = BackgroundFleet(build_releases(home), threads=1)  # the supervisor gets one change at a time
    fleet = CombinedFleet(ours, external, stored_schema(store))
    controller = Controller(
        router=GatewayRouter(gateway, fleet, stored_timeouts(store, external)),
        fleet=fleet,
        judge=LogJudge(
            request_log(home),
            time.time,
            lambda release: read_quality_blocks(objects, release.model, release.name),
        ),
        journals=StoreJournals(objects, leadership, leadership.term),
        versions=CombinedVersions(store, external),
        commands=Inbox(objects, partial(leadership.check, leadership.term)),
        replayer=Replayer(home, store, external, fleet.endpoint),
        check=check_trusted(store, external),
    )
    log.info("the controller has started")
    reported = dict[str, str]()
    with contextlib.suppress(OSError):
        write_problems(home, CONTROLLER, reported)  # an earlier controller's are not this one's

    def tick() -> None:
        nonlocal reported
        controller.tick()
        if controller.problems != reported:
            write_problems(home, CONTROLLER, controller.problems)
            reported = dict(controller.problems)

    try:
        keep_ticking(tick, gateway, stop, every_s=TICK_S)
    finally:
        controller.close()
        ours.close()
    log.info("the controller has stopped")


def main() -> None:
    run_standing("the controller", run, asks_store=True)


if __name__ == "__main__":
    main()
