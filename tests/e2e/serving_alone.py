"""Gateway, controller and real releases in a process of their own (`serin agent --alone`), and the command."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serin.host.process_scan import stack_processes
from serin.host.wiring import build_gateway
from serin.machine.ports import free_ports
from serin.rollout.decide.plan import Plan
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.status import model_status
from tests.kit.waiting import running, tail, until
from tests.signals import kill_9


@dataclass
class Alone:
    """`home` must be SERIN_HOME of the test, too."""

    home: Path
    port: int
    log: Path
    process: subprocess.Popen[bytes]

    def until(self, what: str, true: Callable[[], bool], *, within_s: float = 120.0) -> None:
        until(true, what, within_s=within_s, alive=running(self.process), said=tail(self.log))

    def roll_out(self, model: str, version: int) -> None:
        plan = Plan(steps=(100.0,), min_requests=0, bake_s=0.0)
        answer = home_rollouts(self.home).mailbox.ask(
            Command(kind="start", model=model, version=version, by="test", plan=plan)
        )
        assert answer.accepted, answer.reason
        self.until("live", lambda: self.live(model) == version)

    def live(self, model: str) -> int | None:
        status = model_status(self.home, model)
        return status.live if status else None


@contextmanager
def serving_alone(home: Path, *options: str) -> Iterator[Alone]:
    (port,) = free_ports(1)
    log = home.with_suffix(".log")
    command = [sys.executable, "-m", "serin.cli", "agent", "--alone", "--port", str(port), *options]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    alone = Alone(home, port, log, process)
    controller = home / "logs" / "controller.log"
    begun = controller.read_text().count(_STARTED) if controller.exists() else 0
    try:
        alone.until("the gateway", lambda: build_gateway(home).ready())
        alone.until(
            "the controller",
            lambda: controller.exists() and controller.read_text().count(_STARTED) > begun,
        )
        yield alone
        process.terminate()
        assert process.wait(timeout=120) == 0, log.read_text()
        assert stack_processes(home) == []
    finally:
        process.kill()
        process.wait()
        kill_9(*stack_processes(home))


_STARTED = "the controller has started"
