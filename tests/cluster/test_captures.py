"""Recorded requests of several hosts on a real S3 server (SeaweedFS): watchers that are killed in the middle of an
upload, a store that is away, and rows that are to be deleted everywhere."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from serin.formats.cluster.leader import Leader
from serin.formats.schema import write_schema
from serin.host.state import Stack, write_stack
from serin.machine import environment
from serin.monitoring.capture.all_hosts import FOLLOWED, AllHosts, SharedRecords
from serin.monitoring.capture.read import captured
from serin.store.store import Store
from serin.watcher.cluster_state import LEADER
from tests.cluster.fault_proxy import Fault, Request, fault_proxy
from tests.cluster.seaweedfs import running_seaweedfs
from tests.kit.commands import serin_process
from tests.kit.decoding import built_decoder
from tests.kit.waiting import until
from tests.unit.monitoring.capture.worker import SCHEMA, Worker, request

MODEL = "taxis"
SPEC = "monitoring: {capture: {share: 1}}\n"
WITHIN_S = 240.0  # the machine may be busy


@dataclass(slots=True)
class Network:
    """The way to the store. `away`: it does nothing. `kill`: called in the middle of the next upload of `host`."""

    away: bool = False
    host: str = "a"
    kill: Callable[[], None] | None = None
    killed: threading.Event = field(default_factory=threading.Event)

    def choose(self, sent: Request) -> Fault | None:
        if self.away:
            return Fault(status=503, code="ServiceUnavailable")
        uploads = f"/captures/records/{MODEL}/{self.host}/"
        if (
            self.kill is None
            or sent.method != "PUT"
            or uploads not in sent.path
            or ".parquet" not in sent.path
        ):
            return None
        return Fault(halfway=self._kill, cut="request")

    def _kill(self) -> None:
        assert self.kill is not None
        self.kill()
        self.kill = None
        self.killed.set()


class Host:
    """A home with a watcher and a gateway that leaves requests in a ring."""

    def __init__(self, folder: Path, name: str, variables: dict[str, str]) -> None:
        self.home, self.name = folder / name, name
        own = {"SERIN_HOME": str(self.home), "SERIN_HOST": name, "SERIN_METRICS": "127.0.0.1:0"}
        self._variables = {**variables, **own}
        self.home.mkdir()
        write_stack(Stack(home=self.home, gateway_port=1, agent=True))
        self._worker = Worker(self.home, boot=f"{int(time.time() * 1000):012x}-17-{name:0>8}")
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.sent: list[str] = []

    def answer(self, *numbers: int) -> None:
        self._worker.leave([request(number, time.time(), prefix=self.name) for number in numbers])
        self.sent += [f"{self.name}-{number}" for number in numbers]

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.quick_watcher"],
                env=self._variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def copied(self) -> list[str]:
        """The rows in the copies of all hosts' records, which the leading watcher follows."""
        homes = self.home.glob(f"cache/**/{FOLLOWED}/*/*/captures")
        return sorted(each for home in homes for each in captured(home.parent, MODEL)["_id"].to_pylist())

    def wait_for_copies(self, expected: list[str]) -> None:
        """Waits until this host has copied the rows of all hosts, each once."""
        deadline = time.monotonic() + WITHIN_S
        while (found := self.copied()) != sorted(expected):
            self.check()
            assert time.monotonic() < deadline, f"expected {sorted(expected)}, copied {found}"
            time.sleep(0.5)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait(60)

    def check(self) -> None:
        ended = None if self._process is None else self._process.poll()
        assert ended is None, (
            f"the watcher of {self.name} exited with {ended}:\n{self._log.read_text()[-3000:]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """`reader`: a third host's home, which has no records."""

    a: Host
    b: Host
    reader: Path
    network: Network
    url: str

    def ids(self) -> list[str]:
        """All rows that the store has; each must be there once at any time."""
        store = Store(self.url, cache=self.reader / "cache")
        everywhere = AllHosts(self.reader, SharedRecords.of(store, self.reader), "reader", MODEL)
        found = sorted(each for table in everywhere.tables() for each in table["_id"].to_pylist())
        assert len(found) == len(set(found)), "a row was read twice"
        return found

    def leader(self) -> Host:
        """The host whose watcher leads."""
        stored = Store(self.url).shared_files().read(LEADER)
        assert stored is not None
        name = Leader.load(stored.content).holder.partition("/")[0]
        return {"a": self.a, "b": self.b}[name]

    def wait_for(self, expected: Callable[[], list[str]], *watching: Host) -> None:
        deadline = time.monotonic() + WITHIN_S
        while (found := self.ids()) != sorted(expected()):
            for host in watching:
                host.check()
            assert time.monotonic() < deadline, f"expected {sorted(expected())}, found {found}"
            time.sleep(0.5)


@contextmanager
def scene(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with running_seaweedfs(folder / "server") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SERIN_HOME", str(folder / "reader"))
        publish(Store.open())
        built_decoder()
        network = Network()
        with fault_proxy(variables["AWS_ENDPOINT_URL"], network.choose) as proxy:
            hosts = {**os.environ, "AWS_ENDPOINT_URL": proxy.url}
            a, b = (Host(folder, name, hosts) for name in "ab")
            try:
                yield Scene(a=a, b=b, reader=folder / "reader", network=network, url=variables["SERIN_STORE"])
            finally:
                for host in (a, b):
                    host.kill()
                    host.wait()


def publish(store: Store) -> None:
    with store.workspace() as folder:
        (folder / "spec.yaml").write_text(SPEC)
        write_schema(folder, SCHEMA)
        (folder / "manifest.json").write_text(json.dumps({"name": MODEL, "version": 1}))
        store.publish_bundle(MODEL, store.reserve_version(MODEL), folder)


def test_every_recorded_row_reaches_the_store_once_and_is_deleted_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene(tmp_path, monkeypatch) as here:
        a, b, network = here.a, here.b, here.network
        a.start()
        b.start()
        a.answer(*range(10))
        b.answer(*range(10))
        here.wait_for(lambda: a.sent + b.sent, a, b)

        # The watcher is killed when half of a file was sent.
        network.kill = a.kill
        a.answer(*range(10, 20))
        b.answer(*range(10, 20))
        assert network.killed.wait(WITHIN_S)
        a.wait()
        here.wait_for(lambda: a.sent[:10] + b.sent, b)
        a.answer(20)  # its server runs on
        a.start()
        here.wait_for(lambda: a.sent + b.sent, a, b)

        # The store is away. Requests are recorded on their hosts as before.
        network.away = True
        a.answer(*range(21, 30))
        b.answer(*range(20, 30))
        until(
            lambda: all(host.check() or captured(host.home, MODEL).num_rows >= 30 for host in (a, b)),
            every_s=0.5,
        )
        network.away = False
        here.wait_for(lambda: a.sent + b.sent, a, b)

        # Rows are deleted on all hosts; one of them is down, and has a row that nobody has seen yet.
        b.kill()
        b.wait()
        b.answer(7)
        forget = forgotten("age = 7000", wait_s=WITHIN_S, until=lambda state: state["waiting"] == ["b"])
        assert forget["applied"]["a"]["rows"] == 1
        b.start()
        state = forgotten(None, wait_s=WITHIN_S, until=lambda state: not state["waiting"])
        assert state["applied"]["b"]["rows"] == 2
        kept = [each for each in a.sent + b.sent if not each.endswith("-7")]
        here.wait_for(lambda: kept, a, b)
        for host in (a, b):
            assert 7000 not in captured(host.home, MODEL)["age"].to_pylist()
        leader = here.leader()
        leader.wait_for_copies(kept)
        until(lambda: not any(each.endswith("-7") for host in (a, b) for each in host.copied()), every_s=0.5)
        print(f"{len(kept)} rows of two hosts, each once; deleted: {json.dumps(state['applied'])}")


def forgotten(
    where: str | None, *, wait_s: float, until: Callable[[dict[str, object]], bool]
) -> dict[str, object]:
    """Runs `serin captures forget` on the third host until what it shows is as expected."""
    asks = ["--where", where, "--yes", "--wait", "0s"] if where else []
    deadline = time.monotonic() + wait_s
    while True:
        words = "captures", "forget", MODEL, "--json", *asks
        done = serin_process(*words, env=environment.child_environment(), timeout_s=120)
        (state,) = json.loads(done.stdout)
        if until(state):
            return dict(state)
        assert time.monotonic() < deadline, state
        asks = []
        time.sleep(1.0)
