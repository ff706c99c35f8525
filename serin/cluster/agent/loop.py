"""The agent's process: `python -m serin.cluster.agent.loop`. Keeps the host's releases and gateway as desired.

It needs no clean exit: the supervisor restarts it after a crash, and gateway and releases run on without it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from serin.cluster.agent.agent import Agent
from serin.cluster.agent.link import Link
from serin.cluster.agent.replays import Replays
from serin.cluster.agent.settings import AgentSettings, agent_folder, view_file
from serin.errors import ReleaseNotReady, StackUnusable
from serin.host.standing import run_standing
from serin.host.windows import apply_plans, shared_events
from serin.host.wiring import build_gateway, build_releases, keep_ticking, key_file, request_log
from serin.machine import environment
from serin.machine.durable import write_secret
from serin.rollout.run.background import BackgroundFleet
from serin.store.artifacts import Bundle, Endpoint, Release, parse_label
from serin.store.open import open_objects
from serin.store.store import Store

log = logging.getLogger("serin.cluster.agent")  # not __name__, which is __main__ here

TICK_S: Final = 1.0


def run(home: Path, stop: threading.Event) -> None:
    """Ticks until `stop` is set. Gateway and releases stay as they are then."""
    settings = AgentSettings.read(home)
    if settings is None:
        raise StackUnusable(problem=f"{home} is not the home of an agent; start one with `serin agent`")
    gateway, news = build_gateway(home), threading.Event()
    fleet = (
        None if settings.gateway_only else BackgroundFleet(build_releases(home, HostStore.open()), threads=1)
    )
    url, replays = environment.store_url(), Replays(home, settings.host, partial(_endpoint, fleet))
    link = Link(
        settings.host,
        lambda: open_objects(url),
        folder=agent_folder(home),
        request_log=request_log(home),
        replays=replays,
        keys=key_file(home),
        on_news=news.set,
    )
    place = shared_events()
    agent = Agent(
        settings,
        gateway=gateway,
        fleet=fleet,
        link=link,
        windows=partial(apply_plans, home),
        events=None if place is None else str(place),
    )
    link.start()
    log.info("the agent of host %s has started", settings.host)

    def tick() -> None:
        news.clear()
        view = {"report": asdict(agent.tick()), "store_problem": link.problem}
        write_secret(view_file(home), json.dumps(view))  # for `serin status`, which must not need the store

    keep_ticking(tick, gateway, stop, every_s=TICK_S, wait=partial(_wait, stop, news))
    link.stop(wait_s=3.0)
    replays.close()
    if fleet is not None:
        fleet.close()
    log.info("the agent has stopped")


def _wait(stop: threading.Event, news: threading.Event, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not stop.is_set() and not news.is_set() and (left := end - time.monotonic()) > 0:
        news.wait(min(left, 0.2))


def _endpoint(fleet: BackgroundFleet | None, release: Release) -> Endpoint:
    if fleet is None:
        raise ReleaseNotReady(release=release.name, reason="no release runs on this host", log="none")
    return fleet.endpoint(release)


class HostStore(Store):
    def bundle(self, model: str, version: int | str, *, hold: bool = False) -> Bundle:
        """Returns a version from the host's cache where it has it: versions never change, and a host must be able to
        start its releases while the store is away."""
        numbered = parse_label(str(version)) is not None
        if numbered and (found := self.bundle_here(model, version, hold=hold)) is not None:
            return found
        return super().bundle(model, version, hold=hold)


if __name__ == "__main__":
    run_standing("the agent", run, asks_store=True)
