"""Serving as a container runs it (supervisord, Envoy, the controller, a Triton per release), to hit at, and a whole
stack as `serin up` starts it.

Serving has no Prefect server, and the one its environment names is down: no rollout may need one.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from serin.formats.serving.journal import Decision
from serin.host.process_scan import stack_processes
from serin.host.state import read_stack
from serin.host.supervisor import Supervisor
from serin.host.wiring import build_gateway, controller_process, request_log
from serin.machine.ports import free_ports
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.record import decision2rollout
from serin.serving.triton.repository import build_repository
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.e2e.serving_stack import good_inputs
from tests.kit.commands import serin_process
from tests.kit.waiting import until
from tests.signals import kill_9
from tests.unit.serving import bundles

T = TypeVar("T")

MODEL = bundles.MODEL
PLAN = Plan(
    steps=(10.0, 50.0, 100.0), step_s=3.0, min_requests=20, bake_s=3.0, deadline_s=400.0, drain_s=5.0, load_s=60.0,
    slo_ms=50.0, warmup_s=1.0,
)  # fmt: skip


@dataclass
class Clients:
    """Ask the gateway at a steady rate, each on a connection of its own, whatever becomes of the answers."""

    port: int
    requests_per_s: float = 100.0
    count: int = 8
    inputs: Callable[[], list[dict[str, Any]]] = good_inputs
    answered: int = 0
    errors: list[str] = field(default_factory=list)
    failed_at: list[float] = field(default_factory=list)  # monotonic, of each error
    ids: list[str] = field(
        default_factory=list
    )  # by which the gateway knows the requests that were answered with 200
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Clients:
        self._threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(self.count)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)

    def _ask(self, number: int) -> None:
        every_s = self.count / self.requests_per_s
        at = time.monotonic() + every_s * number / self.count
        body = json.dumps({"inputs": self.inputs()})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=15)
        while not self._stop.wait(max(0.0, at - time.monotonic())):
            at = max(
                at + every_s, time.monotonic() - 1.0
            )  # what could not be asked in time is not made up for later
            try:
                connection.request("POST", f"/v2/models/{MODEL}/infer", body)
                answer = connection.getresponse()
                answer.read()
                self.answered += 1
                if answer.status == 200:
                    self.ids.append(answer.headers["x-request-id"])
                else:
                    self._fail(str(answer.status))
            except (OSError, http.client.HTTPException) as error:
                self._fail(type(error).__name__)
                connection.close()
        connection.close()

    def _fail(self, what: str) -> None:
        self.failed_at.append(time.monotonic())
        self.errors.append(what)


@dataclass
class Stage:
    home: Path
    store: Store
    port: int
    alive: Callable[[], bool]
    log: Path
    settings: dict[str, str]
    up_again: Callable[[], None] = lambda: None

    @property
    def requests(self) -> Path:
        return request_log(self.home)

    def now(self) -> Rollout | None:
        decision = home_rollouts(self.home).last(MODEL)
        return decision2rollout(decision) if decision else None

    def all_decisions(self) -> list[Decision]:
        return home_rollouts(self.home).decisions(MODEL)

    def decisions(self, release: Release) -> list[Decision]:
        return [found for found in self.all_decisions() if decision2rollout(found).candidate == release]

    def publish(self, change: Callable[[str], str] | None = None, **settings: str) -> Release:
        """The next version; `change` is done to the code that Triton runs for it."""
        bundle = bundles.publish(self.store, bias=0.1, **{**self.settings, **settings})
        release = Release(model=bundle.model, version=bundle.version)
        if change is not None:
            folder = build_repository(bundle, self.home / "releases" / release.name / "repository")
            code = folder / release.model / str(release.version) / "model.py"
            code.chmod(0o644)
            code.write_text(change(code.read_text()))
        return release

    def start(self, release: Release, plan: Plan = PLAN) -> None:
        self._tell(Command(kind="start", model=release.model, version=release.version, by="chaos", plan=plan))

    def abort(self, release: Release) -> None:
        self._tell(Command(kind="abort", model=release.model, by="chaos"))

    def _tell(self, what: Command) -> None:
        mailbox = home_rollouts(self.home).mailbox
        mailbox.submit(what)
        answer = self.wait(lambda: mailbox.read_answer(what.name), "the controller's answer", 30)
        assert answer.accepted, answer.reason

    def until(self, release: Release, wanted: Callable[[Rollout], bool], within_s: float) -> Rollout:
        def look() -> Rollout | None:
            now = self.now()
            return now if now and now.candidate == release and wanted(now) else None

        return self.wait(look, f"what was waited for of {release.name}", within_s)

    def wait(self, look: Callable[[], T | None], what: str, within_s: float) -> T:
        return until(look, what, within_s=within_s, every_s=0.05, alive=self.alive, said=self._stands)

    def _stands(self) -> str:
        now = self.now()
        stands = (
            f"{now.candidate.name} is {now.phase} at {now.weight_percent:g}%: {now.reason}" if now else ""
        )
        return f"{stands or 'no rollout'}\n{self.log.read_text()[-2000:]}"

    def pid(self, name: str) -> int:
        """Of a running part: "gateway", "controller" or a release's name."""
        return self.wait(lambda: Supervisor(self.home).pid(name), f"a process {name}", 30)

    @contextmanager
    def other_controller(self, module: str, *arguments: str) -> Iterator[None]:
        """`python -m module` in the controller's place, and the controller again afterwards."""
        supervisor, ours = Supervisor(self.home), controller_process(self.home)
        ours = replace(ours, environment=ours.environment | {"SERIN_STORE": str(self.home / "store")})
        supervisor.start(replace(ours, command=(sys.executable, "-m", module, *arguments), folder=Path.cwd()))
        try:
            yield
        finally:
            supervisor.start(ours)

    def first_release(self, **settings: str) -> Release:
        release = self.publish(**settings)
        self.start(release)
        self.until(release, lambda now: now.phase is Phase.PROMOTED, 90)
        return release


@contextmanager
def stage(**settings: str) -> Iterator[Stage]:
    """`settings`: of every version that is published here."""
    home = Path(tempfile.mkdtemp(prefix="serin-chaos-"))  # short: it holds unix sockets
    port, nobody = free_ports(2)
    log = home / "serve.log"
    variables = {
        **os.environ,
        "SERIN_HOME": str(home),
        "SERIN_STORE": str(home / "store"),
        "PREFECT_API_URL": f"http://127.0.0.1:{nobody}/api",
    }
    with log.open("wb") as output:
        serving = subprocess.Popen(
            [sys.executable, "-m", "serin.cli", "agent", "--alone", "--port", str(port)],
            env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        made = Stage(home, Store(str(home / "store")), port, lambda: serving.poll() is None, log, settings)
        made.wait(lambda: build_gateway(home).ready() or None, "the gateway", 60)
        yield made
    finally:
        serving.send_signal(signal.SIGTERM)
        try:
            serving.wait(40)
        finally:
            serving.kill()
            serving.wait()
            kill_9(*stack_processes(home))
            shutil.rmtree(home, ignore_errors=True)


@contextmanager
def whole_stage(home: Path, **settings: str) -> Iterator[Stage]:
    """A stack with everything that `serin up` starts, in `home`."""
    port, ui_port = free_ports(2)
    variables = {**os.environ, "SERIN_HOME": str(home), "SERIN_STORE": str(home / "store")}
    variables.pop("PREFECT_API_URL", None)

    def serin(*words: str) -> None:
        serin_process(*words, env=variables)

    def is_alive() -> bool:
        stack = read_stack(home)
        return stack is not None and stack.is_alive

    try:
        serin("up", "--port", str(port), "--ui-port", str(ui_port))
        log = Supervisor(home).log
        made = Stage(home, Store(str(home / "store")), port, is_alive, log, settings)
        made.up_again = lambda: serin("up", "--port", str(port), "--ui-port", str(ui_port))
        yield made
    finally:
        with contextlib.suppress(AssertionError):
            serin("down")
        kill_9(*stack_processes(home))
