"""Objectives and candidates behind a real gateway, judged from its log: what fails is found, reported and exchanged."""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from serin.formats.serving.request_log import read_since
from serin.host.wiring import request_log
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.monitoring.alerts.receivers import ReceiverFile
from serin.monitoring.history.read import counts_since
from serin.monitoring.objectives.read import read_objectives
from serin.monitoring.rollbacks import read_rollbacks
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.controller import Controller
from serin.serving.envoy.routes import Timeouts
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store
from serin.watcher.alerts_duty import AlertsDuty
from serin.watcher.duty import Rounds
from serin.watcher.history_duty import HistoryDuty, Promise, Promises
from serin.watcher.objectives_duty import ObjectivesDuty
from tests.e2e.external_scene import PLAN, Scene, asking, scene
from tests.e2e.serving_host import ChildHost
from tests.e2e.serving_stack import start_gateway
from tests.fakes.kserve import MODEL, KServe, serving
from tests.fakes.one_gateway import GatewayRouter, LogJudge
from tests.fakes.rollout import FakeFleet, FakeVersions, home_inbox, home_journals
from tests.fakes.webhooks import webhook
from tests.kit.elsewhere import register
from tests.unit.monitoring.request_lines import GOOD, append

KEY = f"{MODEL}/objective/availability"


class Allowing(Promises):
    """Servers elsewhere have no spec: this is the one that allows rollbacks."""

    def of(self, model: str, version: int) -> Promise:
        del model, version
        return Promise(rollback=True)


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
        version = register(self.stack.store, MODEL, place).version
        plan = Plan(steps=(100.0,), min_requests=0, bake_s=0.0, drain_s=1.0, warmup_s=0.0)
        home_rollouts(self.stack.home).mailbox.submit(
            Command(kind="start", model=MODEL, version=version, by="test", plan=plan)
        )
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
        assert view.objectives[0].bad >= failed - 4


def _live(stack: Scene) -> int | None:
    (now,) = stack.controller.rollouts()
    return None if now.live is None else now.live.version


STABLE, BASELINE = (Release(model=MODEL, version=1, baseline=second) for second in (False, True))
CANDIDATE = Release(model=MODEL, version=2)


@dataclass
class Servers(FakeFleet):
    """Releases whose processes are servers of the test. One that is started again is the next of its servers."""

    places: dict[Release, list[KServe]] = field(default_factory=dict)

    def start(self, release: Release) -> None:
        if self.states.get(release) == "dead":
            self.places[release].pop(0)
        super().start(release)

    def endpoint(self, release: Release) -> Endpoint:
        address = self.places[release][0].address
        return Endpoint(http=address, grpc=address)


@contextmanager
def two_servers(fleet: Servers) -> Iterator[Scene]:
    host = ChildHost()
    home = Path(tempfile.mkdtemp(prefix="serin-e2e-"))  # short: it holds unix sockets
    try:
        gateway, port = start_gateway(home, host)
        controller = Controller(
            router=GatewayRouter(gateway, fleet, lambda _: Timeouts()),
            fleet=fleet,
            judge=LogJudge(gateway.log),
            journals=home_journals(home),
            versions=FakeVersions(published={MODEL: [1, 2]}),
            commands=home_inbox(home),
        )
        try:
            yield Scene(home, port, gateway, controller, Store(str(home / "store")))
        finally:
            controller.close()
    finally:
        host.stop_all()
        shutil.rmtree(home, ignore_errors=True)


def start(stack: Scene, version: int) -> None:
    plan = replace(PLAN, steps=(25.0, 100.0), baseline=True, deadline_s=300.0)
    home_rollouts(stack.home).mailbox.submit(
        Command(kind="start", model=MODEL, version=version, by="test", plan=plan)
    )


def until_held(stack: Scene, hold: Hold | None, within_s: float = 60.0) -> Rollout:
    """Looks at each tick of a rollout that is shifting."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        now = stack.until(*Phase, version=2, within_s=within_s)
        assert now.phase is Phase.SHIFTING, now.reason
        if now.hold is hold:
            return now
        time.sleep(0.05)
    raise AssertionError(f"not held by {hold} within {within_s:g} s: {now.hold}, {now.reason}")


def test_a_candidate_as_fast_as_its_baseline_passes_and_a_baseline_that_dies_costs_no_client() -> None:
    """With its load the stable process is faster than both: held against that, the candidate would be too slow."""
    with (
        serving(delay_s=0.002) as stable,
        serving(delay_s=0.02) as candidate,
        serving(delay_s=0.02) as next_baseline,
        ExitStack() as first,
    ):
        baseline = first.enter_context(serving(delay_s=0.02))
        fleet = Servers(
            places={STABLE: [stable], BASELINE: [baseline, next_baseline], CANDIDATE: [candidate]}
        )
        with two_servers(fleet) as stack:
            start(stack, 1)
            stack.until(Phase.PROMOTED, version=1, within_s=60)
            with asking(stack.port) as clients:
                start(stack, 2)
                stack.until(Phase.SHIFTING, version=2, within_s=60)
                first.close()
                fleet.die(BASELINE)
                assert "control" in until_held(stack, Hold.INCIDENT).reason
                until_held(stack, None)
                done = stack.until(Phase.ROLLED_BACK, Phase.PROMOTED, version=2, within_s=290)
                assert done.phase is Phase.PROMOTED, done.reason
            assert clients.errors == []
            assert set(fleet.stops) == {BASELINE.name, STABLE.name}
            lines = read_since(stack.home / "gateway" / "requests.jsonl", 0.0)
        shares = Counter(line.arm for line in lines if line.epoch == done.evidence_epoch)
        assert shares["stable"] > shares["candidate"] > 0
        assert abs(shares["baseline"] - shares["candidate"]) < 5 * sum(shares.values()) ** 0.5


def test_between_any_two_servers_an_equal_one_takes_over_and_a_slow_one_is_rolled_back() -> None:
    with (
        scene() as stack,
        serving(delay_s=0.004) as stable,
        serving(datatype="INT64") as unfit,
        serving(delay_s=0.004) as equal,
        serving(delay_s=0.08) as slow,
    ):
        stack.start(stable)
        stack.until(Phase.PROMOTED, version=1, within_s=60)
        stack.start(unfit)
        refused = stack.until(Phase.ROLLED_BACK, version=2, within_s=60)
        assert "'x' INT64 [-1, 1] differ from those of sentiment-v1" in refused.reason
        assert unfit.asked == 0
        with asking(stack.port) as clients:
            stack.start(slow)
            back = stack.until(Phase.ROLLED_BACK, Phase.PROMOTED, version=3, within_s=200)
            assert (back.phase, back.live) == (Phase.ROLLED_BACK, Release(model=MODEL, version=1))
            assert "slower than allowed" in back.reason
            asked = slow.asked
            plain = equal.address
            stack.start(equal)
            done = stack.until(Phase.ROLLED_BACK, Phase.PROMOTED, version=4, within_s=200)
            assert done.phase is Phase.PROMOTED, done.reason
            assert done.live == register(stack.store, MODEL, Endpoint(http=plain, grpc=plain))
            assert slow.asked == asked
        assert clients.errors == []
        assert clients.answered > 200
