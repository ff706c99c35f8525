"""The rollout controller of several hosts: `serin controller`. Any number may run; one of them leads.

It runs in the foreground, keeps no state on its machine, and may be killed at any time: all of its state is in the
store, and another controller continues within ten seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from serin.cluster.agents import AgentProcesses
from serin.cluster.combined_fleet import CombinedFleet
from serin.cluster.desired import ClusterRouter, DesiredStates
from serin.cluster.hosts import Hosts
from serin.cluster.judge import ClusterJudge
from serin.cluster.shadow.replayer import Replayer
from serin.cluster.version_settings import (
    check_replicas,
    check_trusted,
    check_windows,
    model_timeouts,
    stored_replicas,
    stored_schema,
    stored_timeouts,
    stored_windows,
)
from serin.errors import LeadershipLost, SerinError, StoreUnreachable
from serin.formats.policy import read_policy
from serin.formats.serving.journal import DecisionCache, journaled_models
from serin.formats.serving.quality_evidence import read_quality_blocks
from serin.machine import environment
from serin.machine.durable import make_private
from serin.rollout.decide.state import Rollout
from serin.rollout.run.background import BackgroundFleet
from serin.rollout.run.commands import Inbox
from serin.rollout.run.controller import Controller
from serin.rollout.run.journal import StoreJournals
from serin.rollout.run.leadership import Leadership, Leads, new_holder
from serin.rollout.run.ports import Processes
from serin.serving.external import External
from serin.store.artifacts import Endpoint, Release
from serin.store.objects import Objects
from serin.store.open import check_conditional, open_objects
from serin.store.store import Store

if TYPE_CHECKING:
    from serin.cluster.kubernetes.fleet import KubernetesFleet

log = logging.getLogger(__name__)

Fleets = Literal["agents", "kubernetes"]
KeepFloors = Callable[[Sequence[Rollout]], Mapping[str, str]]

BEAT: Final = "controller.beat"
TICK_S: Final = 0.5
_STAND_BY_S: Final = 2.0


class LedController:
    """A controller with its ports, for one term of the leadership."""

    _background: BackgroundFleet | None
    _keep_floors: KeepFloors | None = None  # of the autoscalers, where there are any
    _unkept: Mapping[str, str] = MappingProxyType({})  # what failed of it, by model

    def __init__(
        self,
        term: int,
        cache: DecisionCache,
        *,
        objects: Objects,
        store: Store,
        leadership: Leads,
        fleet: Fleets,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """`wait`: how to wait for the gateways, some seconds at most."""
        self._stopped = threading.Event()
        self._check_leads = partial(leadership.check, term)
        self._hosts = Hosts(objects, time.monotonic)
        self._desired = DesiredStates(objects, leadership, term, time.time)
        agents = AgentProcesses(self._desired, self._hosts, stored_replicas(store), time.monotonic)
        self._agents = agents if fleet == "agents" else None
        releases = _kubernetes(store) if fleet == "kubernetes" else None
        self._background = BackgroundFleet(releases) if releases else None
        self._keep_floors = releases.keep_floors if releases else None
        external = External(store)
        timeouts = stored_timeouts(store)
        led = LedProcesses(self._background or agents, leadership, term)
        endpoint_of = partial(_endpoint, external, self._background)
        self._controller = Controller(
            router=ClusterRouter(
                self._desired,
                self._hosts,
                rollouts=self._rollouts,
                timeouts_of=lambda route: asdict(model_timeouts(timeouts, route.releases)),
                endpoint_of=endpoint_of,
                wait=wait or self._stopped.wait,
                steady=time.monotonic,
            ),
            fleet=CombinedFleet(led, external, stored_schema(store), stored_windows(store)),
            judge=ClusterJudge(
                objects,
                self._hosts,
                time.time,
                lambda release: read_quality_blocks(objects, release.model, release.name),
            ),
            journals=StoreJournals(objects, leadership, term, cache=cache),
            versions=ClusterVersions(store, leadership, term),
            commands=Inbox(objects, self._check_leads),
            replayer=Replayer(objects, self._desired, self._hosts, store, external, endpoint_of),
            check=self._check(store, external, shared=wait is None),
            approval=lambda: read_policy(store).approval,
            lacks=releases.lacks if releases else lambda _: "",
        )

    def take_over(self) -> None:
        """Makes it impossible for an earlier leader to decide or to act."""
        self._hosts.refresh()
        self._desired.affirm()
        self._controller.affirm()

    def tick(self) -> None:
        self._hosts.refresh()
        if self._agents is not None:
            self._agents.tidy([now.live for now in self._rollouts() if now.phase.final and now.live])
        self._controller.tick()
        if self._keep_floors is not None:
            self._check_leads()
            self._note(self._keep_floors(self._rollouts()))

    def close(self) -> None:
        self._stopped.set()
        if self._agents is not None:
            self._agents.close()
        if self._background is not None:
            self._background.close()
        self._controller.close()

    def _check(self, store: Store, external: External, *, shared: bool) -> Callable[[Release], None]:
        """What is checked before a rollout. `shared`: several hosts may serve a version."""
        checks = [check_trusted(store, external)]
        if shared:
            checks.append(check_windows(store, lambda: self._hosts.reports))
        if self._agents is not None:
            checks.append(check_replicas(store, shared=shared))

        def check(release: Release) -> None:
            for each in checks:
                each(release)

        return check

    def _note(self, unkept: Mapping[str, str]) -> None:
        """Logs the problems with floors, once each."""
        for model in unkept.keys() - self._unkept.keys():
            log.warning("the autoscalers of %s: %s", model, unkept[model])
        self._unkept = unkept

    @property
    def problems(self) -> Mapping[str, str]:
        return {**self._unkept, **self._controller.problems}

    def _rollouts(self) -> list[Rollout]:
        return self._controller.rollouts()


def _kubernetes(store: Store) -> KubernetesFleet:
    from serin.cluster.kubernetes.fleet import build_fleet  # its client is in an extra

    return build_fleet(store)


def run(home: Path, fleet: Fleets, stop: threading.Event) -> None:
    """Leads or stands by until `stop` is set, and waits for a store that is away. Raises StoreNotConditional for one
    that cannot be shared."""
    objects, store = open_objects(environment.store_url()), Store.open()
    make_private(home)
    _await_store(home, objects, stop)
    holder = new_holder()
    leadership = Leadership(objects, holder)
    build = partial(LedController, objects=objects, store=store, leadership=leadership, fleet=fleet)
    loop, ended = Loop(objects, leadership, build), threading.Event()
    renewing = threading.Thread(target=leadership.run, args=(ended,), name="leadership", daemon=True)
    renewing.start()
    log.info("the controller %s has started; store %s", holder, objects.url)
    try:
        while not stop.is_set():
            began = time.monotonic()
            loop.round()
            beat(home, "stands by" if leadership.term is None else "leads")
            pause = _STAND_BY_S if leadership.term is None else TICK_S
            _pause(stop, leadership, pause - (time.monotonic() - began))
    finally:
        loop.step_down()
        ended.set()
        renewing.join(timeout=30.0)
        _resign(leadership)
    log.info("the controller has stopped")


def _await_store(home: Path, objects: Objects, stop: threading.Event) -> None:
    waiting = False
    while not stop.is_set():
        try:
            check_conditional(objects)
            return
        except StoreUnreachable as error:
            if not waiting:
                log.warning("waiting for the store: %s", error)
            waiting = True
        beat(home, "waits for the store")
        stop.wait(_STAND_BY_S)


def beat(home: Path, doing: str) -> None:
    """Shows probes that the loop continues, and what it does."""
    try:
        (home / BEAT).write_text(f"{doing}\n")
    except OSError as error:  # a full disk does not keep it from leading
        log.warning("%s cannot be written: %s", home / BEAT, error)


def _pause(stop: threading.Event, leadership: Leadership, seconds: float) -> None:
    """Waits, at most until this process begins to lead."""
    end, led = time.monotonic() + seconds, leadership.term
    while time.monotonic() < end and leadership.term == led and not stop.wait(0.1):
        pass


def _resign(leadership: Leadership) -> None:
    try:
        leadership.resign()
    except StoreUnreachable as error:
        log.warning("the leadership could not be given back: %s", error)


class LedProcesses:
    """Processes that are started and stopped only while this controller leads: agents' (agents.py), or another
    scheduler's."""

    def __init__(self, processes: Processes, leadership: Leads, term: int) -> None:
        self._leadership, self._term = leadership, term
        self.start = self._led(processes.start)
        self.stop = self._led(processes.stop)
        self.state, self.instance, self.running = processes.state, processes.instance, processes.running
        self.endpoint, self.verify = processes.endpoint, processes.verify

    def _led(self, act: Callable[[Release], None]) -> Callable[[Release], None]:
        def do(release: Release) -> None:
            self._leadership.check(self._term)
            act(release)

        return do


def _endpoint(external: External, scheduler: Processes | None, release: Release) -> Endpoint | None:
    """Returns where a release answers; None: agents run it, and each gateway knows where."""
    if external.has(release):
        return external.endpoint(release)
    return scheduler.endpoint(release) if scheduler else None


class ClusterVersions:
    """The store's versions and aliases. An alias is moved only while this controller leads: if it is frozen in the
    middle, what another leader wrote stays."""

    def __init__(self, versions: Store, leadership: Leads, term: int) -> None:
        self._versions, self._leadership, self._term = versions, leadership, term
        self.editions, self.aliased = versions.editions, versions.aliased

    def set_alias(self, model: str, alias: str, version: str | None) -> None:
        self._versions.set_alias(model, alias, version, check=lambda: self._leadership.check(self._term))


# Each term has a new controller, built from the store alone: nothing that another term believed is carried over.
class Loop:
    """`build`: makes the controller of a term."""

    def __init__(
        self, objects: Objects, leadership: Leadership, build: Callable[[int, DecisionCache], LedController]
    ) -> None:
        self._objects, self._leadership, self._build = objects, leadership, build
        self._cache = DecisionCache(objects)
        self._led: LedController | None = None
        self._term: int | None = None

    def round(self) -> None:
        """Ticks once if this process leads, else gets ready to take over."""
        term = self._leadership.term
        if term is None or term != self._term:
            self.step_down()
        try:
            if term is None:
                self._warm_up()
                return
            if self._led is None:
                self._led = self._began(term)
                self._term = term
            self._led.tick()
        except LeadershipLost as error:
            log.warning("%s", error)
            self._leadership.lose(term if term is not None else 0)
            self.step_down()
        except (OSError, SerinError) as error:  # a decision that was not recorded was not made: retry
            log.warning("this tick failed: %s", error)

    def _began(self, term: int) -> LedController:
        """Builds the controller of a term. One that could not take over has not begun."""
        led = self._build(term, self._cache)
        try:
            led.take_over()
        except BaseException:
            led.close()
            raise
        return led

    def step_down(self) -> None:
        if self._led is not None:
            log.info("this controller does not lead any more")
            self._led.close()
        self._led = self._term = None

    def _warm_up(self) -> None:
        """Reads the journals, so that a change of the leader does not wait for that."""
        for model in journaled_models(self._objects):
            self._cache.all(model)
