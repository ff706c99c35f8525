"""Servers that are not ours behind a real Envoy, with a controller that the test ticks, and clients that ask."""

import http.client
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from serin.cluster.combined_fleet import CombinedFleet
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.controller import Controller
from serin.serving.envoy.gateway import Gateway
from serin.serving.envoy.routes import Timeouts
from serin.serving.external import External
from serin.store.artifacts import Endpoint
from serin.store.store import Store
from tests.e2e.serving_host import ChildHost
from tests.e2e.serving_stack import start_gateway
from tests.fakes.kserve import MODEL, KServe
from tests.fakes.one_gateway import GatewayRouter, LogJudge
from tests.fakes.rollout import FakeFleet, home_inbox, home_journals
from tests.kit.elsewhere import register
from tests.kit.threads import beside

# Wide margins: what is shown here is the way, not the power, and proof of a narrow one takes a minute.
PLAN = Plan(
    steps=(50.0, 100.0), step_s=2.0, min_requests=40, margin=0.5, bad_margin=2.0, bake_s=1.0, deadline_s=200.0,
    drain_s=2.0, false_rollback=0.1, false_promotion=0.2, warmup_s=1.0,
)  # fmt: skip


@dataclass
class Clients:
    """Asks the gateway from several connections until it is stopped."""

    port: int
    errors: list[str] = field(default_factory=list)
    answered: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        while not self.stop.wait(0.01):
            try:
                connection.request("POST", f"/v2/models/{MODEL}/infer", b'{"inputs": []}')
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(str(error))
                connection.close()
                continue
            if answer.status != 200:
                self.errors.append(str(answer.status))
            self.answered += 1
        connection.close()


@contextmanager
def asking(port: int) -> Iterator[Clients]:
    clients = Clients(port)
    with beside(*[clients.ask] * 4, stop=clients.stop):
        yield clients


@dataclass
class Scene:
    home: Path
    port: int
    gateway: Gateway
    controller: Controller
    store: Store

    def start(self, server: KServe) -> None:
        place = Endpoint(http=server.address, grpc=server.address)
        version = register(self.store, MODEL, place).version
        start = Command(kind="start", model=MODEL, version=version, by="test", plan=PLAN)
        home_rollouts(self.home).mailbox.submit(start)

    def until(self, *phases: Phase, version: int, within_s: float) -> Rollout:
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            self.controller.tick()
            for now in self.controller.rollouts():
                if now.phase in phases and now.candidate.version == version:
                    return now
            time.sleep(0.1)
        raise AssertionError(f"not {phases} in {within_s} s: {self.controller.rollouts()}")


@contextmanager
def scene() -> Iterator[Scene]:
    host = ChildHost()
    home = Path(tempfile.mkdtemp(prefix="serin-e2e-"))  # short: it holds unix sockets
    try:
        gateway, port = start_gateway(home, host)
        store = Store(str(home / "store"))
        fleet = CombinedFleet(FakeFleet(), External(store), {}.__getitem__)
        controller = Controller(
            router=GatewayRouter(gateway, fleet, lambda _: Timeouts()),
            fleet=fleet,
            judge=LogJudge(gateway.log),
            journals=home_journals(home),
            versions=store,
            commands=home_inbox(home),
        )
        try:
            yield Scene(home, port, gateway, controller, store)
        finally:
            controller.close()
    finally:
        host.stop_all()
        shutil.rmtree(home, ignore_errors=True)
