"""A candidate held against a second process of the stable version, behind a real Envoy, judged from its log."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from serin.formats.serving.request_log import read_since
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.run.commands import Command, Inbox, submit
from serin.rollout.run.controller import Controller
from serin.rollout.run.judge import LogJudge
from serin.rollout.run.record import JournalFolder
from serin.serving.envoy.routes import Timeouts
from serin.serving.external import External
from serin.stack.controller import GatewayRouter
from serin.store.artifacts import Endpoint, Release
from tests.e2e.external_scene import PLAN, Scene, asking
from tests.e2e.serving_host import ChildHost
from tests.e2e.serving_stack import start_gateway
from tests.fakes.kserve import MODEL, KServe, serving
from tests.fakes.rollout import FakeFleet, FakeVersions

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
def scene(fleet: Servers) -> Iterator[Scene]:
    host = ChildHost()
    home = Path(tempfile.mkdtemp(prefix="serin-e2e-"))  # short: it holds unix sockets
    try:
        gateway, port = start_gateway(home, host)
        controller = Controller(
            router=GatewayRouter(gateway, fleet, lambda _: Timeouts()),
            fleet=fleet,
            judge=LogJudge(gateway.log),
            journals=JournalFolder(home),
            versions=FakeVersions(published={MODEL: [1, 2]}),
            commands=Inbox(home),
        )
        try:
            yield Scene(home, port, gateway, controller, External(home))
        finally:
            controller.close()
    finally:
        host.stop_all()
        shutil.rmtree(home, ignore_errors=True)


def start(stack: Scene, version: int) -> None:
    plan = replace(PLAN, steps=(25.0, 100.0), baseline=True, deadline_s=300.0)
    submit(stack.home, Command(kind="start", model=MODEL, version=version, by="test", plan=plan))


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
        with scene(fleet) as stack:
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
