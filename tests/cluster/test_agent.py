"""`serin agent --gateway-only` as a process: what it routes to, and what survives its end."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serin.formats.cluster.desired_state import DesiredState, key_of
from serin.formats.cluster.host_report import AgentReport, agent_key
from serin.host.process_scan import stack_processes
from serin.host.supervisor import Supervisor
from serin.host.wiring import AGENT
from serin.machine.ports import free_ports
from serin.store.artifacts import Endpoint, ModelRoute, Release
from serin.store.objects import FolderObjects
from tests.fakes.kserve import MODEL, KServe, serving
from tests.kit.commands import SERIN, serin_process
from tests.kit.waiting import running, tail, until
from tests.kit.web import ask
from tests.signals import hit, kill_9

V1 = Release(model=MODEL, version=1)


class Pod:
    def __init__(self, folder: Path) -> None:
        self.home, self.objects = folder / "home", FolderObjects(folder / "store")
        (self.port,) = free_ports(1)
        self._log = folder / "agent.log"
        self._variables = {
            **os.environ,
            "SERIN_HOME": str(self.home),
            "SERIN_STORE": str(folder / "store"),
            "SERIN_HOST": "pod-1",
        }
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [*SERIN, "agent", "--gateway-only", "--port", str(self.port)]
        with self._log.open("ab") as output:
            return subprocess.Popen(command, env=self._variables, stdout=output, stderr=subprocess.STDOUT)

    def serin(self, *words: str) -> subprocess.CompletedProcess[str]:
        return serin_process(*words, env=self._variables, code=None, timeout_s=120)

    def want(self, seq: int, server: KServe) -> None:
        place = Endpoint(http=server.address, grpc=server.address)
        desired = DesiredState(
            seq=seq,
            term=1,
            by="c",
            t=0.0,
            endpoints={V1.name: place},
            routes=(ModelRoute(model=MODEL, epoch=seq, stable=V1),),
        )
        self.objects.create(key_of(seq), desired.dump())
        self.until(lambda: self.in_force() == seq)

    def in_force(self) -> int:
        found = self.objects.read(agent_key("pod-1"))
        return AgentReport.load(found.content).desired_seq if found else 0

    def until(self, true: Callable[[], bool], within_s: float = 120.0) -> None:
        until(true, within_s=within_s, alive=running(self.process), said=tail(self._log))

    def ask(self) -> int:
        return ask(self.port, f"/v2/models/{MODEL}/infer", {"inputs": []}).status


@pytest.fixture
def pod() -> Iterator[Pod]:
    folder = Path(tempfile.mkdtemp(prefix="serin-agent-"))  # short: it holds unix sockets
    made = Pod(folder)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        kill_9(*stack_processes(made.home))
        shutil.rmtree(folder)


def test_the_gateway_outlives_its_agent_and_ends_with_the_next_one(pod: Pod) -> None:
    with serving() as server:
        pod.want(1, server)
        assert pod.ask() == 200
        before = {child.name: child.pid for child in Supervisor(pod.home).children()}
        hit(pod.process.pid)
        pod.process.wait()
        hit(before[AGENT] or 0)
        assert pod.ask() == 200, "neither the agent nor its loop is needed for that"
        pod.process = pod.start()
        pod.want(2, server)
        after = {child.name: child.pid for child in Supervisor(pod.home).children()}
        assert after["gateway"] == before["gateway"]
        assert after[AGENT] != before[AGENT]
        shown = pod.serin("status")
        assert (shown.returncode, "state    2 of controller c, in force" in shown.stdout) == (0, True), shown
        done = pod.serin("down")
        assert (done.returncode, done.stdout) == (0, "down\n"), done
    assert pod.process.wait(60) == 0
    assert stack_processes(pod.home) == []
    assert pod.objects.read(agent_key("pod-1")) is None, "another pod takes its place under another name"
