"""Objectives behind a real gateway: a release that fails is found, reported and exchanged, whatever a webhook does."""

from __future__ import annotations

import time
from collections.abc import Callable

from serin.monitoring.alerts.book import AlertBook
from serin.monitoring.alerts.read import read_alerts
from serin.monitoring.alerts.receivers import ReceiverFile
from serin.monitoring.history.read import counts_since
from serin.monitoring.objectives.read import read_objectives
from serin.monitoring.rollbacks import read_rollbacks
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase
from serin.rollout.run.commands import Command, submit
from serin.spec.monitoring import ObjectivesSpec
from serin.stack.watch.alerts_duty import AlertsDuty
from serin.stack.watch.duty import Rounds
from serin.stack.watch.history_duty import HistoryDuty
from serin.stack.watch.objectives_duty import ObjectivesDuty
from serin.stack.watch.promises import Promise, Promises
from serin.stack.wiring import request_log
from serin.store.artifacts import Endpoint
from tests.e2e.external_scene import Scene, asking, scene
from tests.fakes.kserve import MODEL, KServe, serving
from tests.fakes.webhooks import webhook
from tests.unit.monitoring.request_lines import GOOD, append

KEY = f"{MODEL}/objective/availability"


class Allowing(Promises):
    """Servers elsewhere have no spec: this is the one that allows rollbacks."""

    def of(self, model: str, version: int) -> Promise:
        del model, version
        return Promise(objectives=ObjectivesSpec(rollback=True))


class Watched:
    """The controller and the watcher's duties, as fast as they can."""

    def __init__(self, stack: Scene) -> None:
        promises = Allowing(stack.home)
        history = HistoryDuty(stack.home, promises)
        objectives = ObjectivesDuty(stack.home, AlertBook(stack.home), promises)
        history.every_s = objectives.every_s = 0.2
        self.stack = stack
        self.rounds = Rounds([AlertsDuty(stack.home), history, objectives])

    def until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, read_alerts(self.stack.home, lines=20)
            self.rounds.run(time.time())
            self.stack.controller.tick()
            time.sleep(0.05)

    def switch(self, server: KServe) -> None:
        place = Endpoint(http=server.address, grpc=server.address)
        version = self.stack.external.register(MODEL, place).version
        plan = Plan(steps=(100.0,), min_requests=0, bake_s=0.0, drain_s=1.0, warmup_s=0.0)
        submit(self.stack.home, Command(kind="start", model=MODEL, version=version, by="test", plan=plan))
        self.stack.until(Phase.PROMOTED, version=version, within_s=60)


def test_a_release_that_fails_is_reported_and_exchanged_while_a_webhook_hangs() -> None:
    with (
        scene() as stack,
        serving() as good,
        serving() as bad,
        webhook() as hanging,
        webhook() as team,
    ):
        hanging.hangs.set()
        ReceiverFile(stack.home).add("hanging", hanging.url)
        ReceiverFile(stack.home).add("team", team.url)
        watched = Watched(stack)
        try:
            watched.switch(good)
            now = time.time()  # an hour of good requests before, at one every three seconds
            before = [
                GOOD._replace(t=now - 3_600 + 3 * n, model=MODEL, release=f"{MODEL}-v1") for n in range(1_190)
            ]
            append(request_log(stack.home), before)
            with asking(stack.port) as clients:
                watched.until(lambda: clients.answered > 50)
                watched.switch(bad)
                bad.fails_every = 2
                watched.until(lambda: bool(read_rollbacks(stack.home, MODEL)))
                watched.until(
                    lambda: stack.controller.rollouts()[0].phase is Phase.PROMOTED and _live(stack) == 1
                )
                failed = len(clients.errors)
                watched.until(lambda: clients.answered > 50 + failed * 2 + 200)
                assert len(clients.errors) <= failed + 4, "one request each was in flight"
            (fired, *more) = team.wait_for(1)
            watched.until(lambda: hanging.connections > 0)
        finally:
            watched.rounds.close()
        assert (fired["key"], fired["event"], fired["severity"], more) == (KEY, "fired", "page", [])
        assert set(clients.errors) == {"500"}, "every request was answered"
        (made,) = read_rollbacks(stack.home, MODEL)
        assert (made.from_version, made.to_version, made.accepted) == (2, 1, True)
        counted = sum(each.requests for each in counts_since(stack.home, MODEL, now - 7_200))
        assert 0 <= len(before) + clients.answered - counted <= 400, "lines that Envoy has not written yet"
        view = read_objectives(stack.home, MODEL)
        assert view is not None
        assert view.objectives[0].bad >= failed - 4


def _live(stack: Scene) -> int | None:
    (now,) = stack.controller.rollouts()
    return None if now.live is None else now.live.version
