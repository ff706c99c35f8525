"""Rollouts on real Tritons behind a real Envoy, with candidates that fail on purpose: `python -m tests.chaos.rollout`.

Prints one line per case: what was decided, how long after the trouble began, what clients saw, and who is live.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from serin.artifacts import Release
from serin.rollout.background import BackgroundFleet
from serin.rollout.commands import Command, Inbox, submit
from serin.rollout.controller import Controller
from serin.rollout.judge import LogJudge
from serin.rollout.plan import Plan
from serin.rollout.record import JournalFolder
from serin.rollout.state import Phase, Rollout
from serin.serving.envoy_routes import Timeouts
from serin.serving.releases import Releases
from serin.serving.repository import build_repository
from serin.stack.controller import Door
from serin.store import Store
from tests.e2e.serving_host import ChildHost
from tests.e2e.serving_stack import PROCESS_NAME, good_inputs, start_gateway
from tests.unit.serving import bundles

PLAN = Plan(
    steps=(10.0, 50.0, 100.0), step_s=3.0, min_requests=20, bake_s=3.0, deadline_s=300.0, drain_s=5.0, load_s=60.0,
    slo_ms=50.0,
)  # fmt: skip


@dataclass
class Clients:
    """Asks the gateway about 100 times a second, whatever becomes of the answers."""

    port: int
    answered: int = 0
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Clients:
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(8)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)

    def _ask(self) -> None:
        body = json.dumps({"inputs": good_inputs()})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=15)
        while not self._stop.wait(0.08):
            try:
                connection.request("POST", f"/v2/models/{bundles.MODEL}/infer", body)
                answer = connection.getresponse()
                answer.read()
                self.answered += 1
                if answer.status != 200:
                    self.errors.append(str(answer.status))
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
                connection.close()
        connection.close()


@dataclass
class Scene:
    home: Path
    store: Store
    host: ChildHost
    releases: Releases
    controller: Controller
    port: int

    def publish(self, change: Callable[[str], str] | None = None) -> Release:
        """The next version; `change` is done to the code that Triton runs for it."""
        bundle = bundles.publish(self.store, bias=0.1)
        release = Release(model=bundle.model, version=bundle.version)
        if change is not None:
            folder = build_repository(bundle, self.home / "releases" / release.name / "repository")
            code = folder / release.model / str(release.version) / "model.py"
            code.chmod(0o644)
            code.write_text(change(code.read_text()))
        return release

    def start(self, release: Release) -> None:
        submit(
            self.home,
            Command(kind="start", model=release.model, version=release.version, by="chaos", plan=PLAN),
        )

    def until(self, release: Release, wanted: Callable[[Rollout], bool], within_s: float) -> Rollout:
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            began = time.monotonic()
            self.controller.tick()
            for now in self.controller.rollouts():
                if now.candidate == release and wanted(now):
                    return now
            time.sleep(max(0.0, 0.5 - (time.monotonic() - began)))
        raise AssertionError(f"not in {within_s} s: {self.controller.rollouts()}")


@contextmanager
def scene() -> Iterator[Scene]:
    host = ChildHost()
    home = Path(tempfile.mkdtemp(prefix="serin-chaos-"))  # short: it holds unix sockets
    store = Store(str(home / "store"))
    releases = Releases(home / "releases", host=host, store=store)
    fleet = BackgroundFleet(releases, threads=1)
    try:
        gateway, port = start_gateway(home, host)
        controller = Controller(
            router=Door(gateway, fleet, lambda _: Timeouts(request_s=4.0, per_try_s=1.0)),
            fleet=fleet,
            judge=LogJudge(gateway.log),
            journals=JournalFolder(home),
            versions=store,
            commands=Inbox(home),
            say=lambda text: print(f"    {text[:200]}", file=sys.stderr, flush=True),
        )
        try:
            yield Scene(home, store, host, releases, controller, port)
        finally:
            controller.close()
            fleet.close()
    finally:
        host.stop(PROCESS_NAME)  # Triton waits for open connections, and Envoy keeps some
        for release in releases.running():
            releases.stop(release)
        host.stop_all()
        shutil.rmtree(home, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    ends: Phase
    change: Callable[[str], str] | None = None  # of the candidate's code
    strike: signal.Signals | None = None  # given to the candidate's processes once it has traffic
    within_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    case: Case
    phase: Phase
    seconds: float  # from the trouble (a strike, or the first traffic) to the end of the candidate's traffic
    reason: str
    answered: int
    errors: int
    kinds: tuple[str, ...]
    live: int


def play(stack: Scene, case: Case) -> Outcome:
    candidate = stack.publish(case.change)
    live = stack.controller.rollouts()[0].live
    assert live is not None
    with Clients(stack.port) as clients:
        stack.start(candidate)
        now = stack.until(candidate, lambda now: now.phase is Phase.SHIFTING or now.phase.final, 90)
        began = time.time()
        if case.strike is not None:
            now = stack.until(candidate, lambda now: now.weight_percent == 50, 90)
            pid = stack.host.pid(candidate.name)
            assert pid is not None
            began = time.time()
            os.killpg(pid, case.strike)
        leaving = (Phase.ABORTING, Phase.DRAINING)
        turned = stack.until(candidate, lambda now: now.phase in leaving or now.phase.final, case.within_s)
        seconds = time.time() - began
        now = stack.until(candidate, lambda now: now.phase.final, 60)
    assert now.live is not None
    return Outcome(
        case=case,
        phase=now.phase,
        seconds=seconds,
        reason=turned.reason,
        answered=clients.answered,
        errors=len(clients.errors),
        kinds=tuple(clients.errors),
        live=now.live.version,
    )


def first_release(stack: Scene) -> None:
    release = stack.publish()
    stack.start(release)
    stack.until(release, lambda now: now.phase is Phase.PROMOTED, 90)


def _execute(line: str) -> Callable[[str], str]:
    """Puts a line at the start of what Triton calls for each batch."""

    def change(code: str) -> str:
        head, found, rest = code.partition("    def execute(")
        assert found, "the model has no execute"
        signature, newline, body = rest.partition("\n")
        return f"import random\nimport time\n{_imports_last(head)}{found}{signature}{newline}        {line}\n{body}"

    return change


def _imports_last(head: str) -> str:
    return head.replace("from __future__ import annotations\n", "")


KILLED = Case(name="killed -9", ends=Phase.ROLLED_BACK, strike=signal.SIGKILL)
HUNG = Case(name="hung (SIGSTOP)", ends=Phase.ROLLED_BACK, strike=signal.SIGSTOP)
EQUAL = Case(name="equal", ends=Phase.PROMOTED, within_s=240)
CASES = (
    EQUAL,
    KILLED,
    HUNG,
    Case(name="30 ms slower", ends=Phase.ROLLED_BACK, change=_execute("time.sleep(0.03)")),
    Case(
        name="slow in 2%", ends=Phase.ROLLED_BACK, within_s=400,
        change=_execute("time.sleep(0.2 if random.random() < 0.02 else 0)"),
    ),
    Case(
        name="fails 5%", ends=Phase.ROLLED_BACK, within_s=240,
        change=_execute("assert random.random() >= 0.05, 'on purpose'"),
    ),
    Case(name="never ready", ends=Phase.ROLLED_BACK, change=lambda code: code + "\nraise RuntimeError('on purpose')\n"),
)  # fmt: skip


def line(outcome: Outcome) -> str:
    as_wanted = "as wanted" if outcome.phase is outcome.case.ends else f"WANTED {outcome.case.ends}"
    return (
        f"{outcome.case.name:<16} {outcome.phase:<12} {outcome.seconds:6.1f} s  {outcome.errors} of {outcome.answered} "
        f"requests failed {sorted(set(outcome.kinds))}  live: v{outcome.live}  {as_wanted}  ({outcome.reason[:90]})"
    )


def main() -> int:
    wanted = set(sys.argv[1:])
    outcomes = []
    with scene() as stack:
        first_release(stack)
        for case in CASES:
            if not wanted or case.name in wanted:
                outcomes.append(play(stack, case))
                print(line(outcomes[-1]), flush=True)
    return 0 if all(found.phase is found.case.ends and not found.errors for found in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
