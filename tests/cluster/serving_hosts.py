"""Hosts that serve: agents in namespaces with certificates between their gateways, and a store in one more."""

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serin.formats.cluster.desired_state import DesiredState, EvidenceArm, key_of
from serin.formats.cluster.evidence import HostEvidence
from serin.formats.cluster.host_report import AgentReport, agent_key
from serin.host.supervisor import Supervisor
from serin.store.artifacts import ModelRoute, Release
from serin.store.objects import Objects
from serin.store.open import open_objects
from serin.store.store import Store
from tests.cluster.namespaces import Host, end, hosts
from tests.cluster.seaweedfs import running_seaweedfs
from tests.e2e.serving_certificates import Authority
from tests.e2e.serving_stack import good_inputs
from tests.kit.threads import beside
from tests.kit.web import ask
from tests.unit.serving import bundles

MODEL = bundles.MODEL
SPEC = "objectives: {latency_ms: 500}\nserving: {request_timeout: 10s}\nmonitoring: {capture: {share: 1.0}}\n"
SERIN = [sys.executable, "-m", "serin.cli"]


@dataclass
class Member:
    """One host that serves."""

    host: Host
    home: Path
    port: int
    peer_port: int
    variables: Mapping[str, str]
    process: subprocess.Popen[str] | None = None

    @property
    def name(self) -> str:
        return self.host.name

    def start(self) -> None:
        folder = self.home.parent / f"{self.name}-tls"
        words = ["agent", "--address", self.host.address, "--port", str(self.port)]
        words += ["--peer-port", str(self.peer_port), "--peer-cert", str(folder / "peer.pem")]
        words += ["--peer-key", str(folder / "peer.key"), "--peer-ca", str(folder / "ca.pem")]
        self.process = self.host.popen(
            [*SERIN, *words], log=self.home.with_suffix(".log"), env=dict(self.variables)
        )

    def serin(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.host.run([*SERIN, *words], env=dict(self.variables), check=check, within_s=120.0)

    def pids(self) -> dict[str, int | None]:
        return {child.name: child.pid for child in Supervisor(self.home).children()}

    def ask(self, inputs: Sequence[Mapping[str, Any]] | None = None) -> tuple[int, str]:
        """Status and body of an inference that a client on this host sends to its gateway."""
        body = {"inputs": good_inputs() if inputs is None else inputs}
        with self.host.inside():
            answer = ask(f"{self.host.address}:{self.port}", f"/v2/models/{MODEL}/infer", body)
            return answer.status, answer.text


@dataclass
class Load:
    """What clients of one gateway got."""

    answered: int = 0
    errors: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.answered} answers, {len(self.errors)} errors {self.errors[:3]}, slowest {self.slowest_s:.2f} s"


@dataclass
class Cluster:
    members: dict[str, Member]
    network: dict[str, Host]
    store_host: Host
    objects: Objects
    store: Store
    variables: Mapping[str, str]
    folder: Path
    seq: int = 0

    def publish(self, bias: float, spec: str = SPEC, **settings: Any) -> Release:
        with self.store_host.inside():
            version = bundles.publish(self.store, bias=bias, spec=spec, **settings).version
        return Release(model=MODEL, version=version)

    def want(
        self,
        hosts: Mapping[str, Sequence[str]],
        *routes: ModelRoute,
        arms: Mapping[str, EvidenceArm] | None = None,
        **limits: Any,
    ) -> int:
        """Writes the next desired state as a controller does; returns its number."""
        self.seq += 1
        desired = DesiredState(
            seq=self.seq,
            term=1,
            by="test",
            t=time.time(),
            hosts={name: tuple(where) for name, where in hosts.items()},
            routes=routes,
            timeouts={
                MODEL: {"request_s": 10.0, "promised_s": 0.5, "shares": dict.fromkeys(hosts, 1.0), **limits}
            },
            arms=arms or {},
        )
        with self.store_host.inside():
            self.objects.create(key_of(self.seq), desired.dump())
        return self.seq

    def report(self, name: str) -> AgentReport | None:
        with self.store_host.inside():
            found = self.objects.read(agent_key(name))
        return AgentReport.load(found.content) if found else None

    def evidence(self, name: str) -> list[HostEvidence]:
        with self.store_host.inside():
            found = [self.objects.read(key) for key in self.objects.keys(f"cluster/evidence/{name}/")]
        return [HostEvidence.load(stored.content) for stored in found if stored]

    def until(self, true: Callable[[], Any], *, within_s: float = 180.0, what: str = "") -> None:
        """Waits, and fails at once when an agent that should run has ended."""
        until = time.monotonic() + within_s
        while not true():
            for member in self.members.values():
                if member.process is not None and member.process.poll() is not None:
                    raise AssertionError(
                        f"{member.name} ended: {member.home.with_suffix('.log').read_text()}"
                    )
            if time.monotonic() > until:
                reports = {name: self.report(name) for name in self.members}
                logs = "\n".join(
                    m.home.with_suffix(".log").read_text()[-2000:] for m in self.members.values()
                )
                raise AssertionError(f"not within {within_s:.0f} s: {what}; {reports}\n{logs}")
            time.sleep(0.2)

    def ready(self, release: Release, *names: str) -> bool:
        found = [self.report(name) for name in names]
        return all(
            report is not None
            and release.name in report.releases
            and report.releases[release.name].verified == ""
            and report.releases[release.name].state == "ready"
            for report in found
        )

    def in_force(self, seq: int, *names: str) -> bool:
        found = [self.report(name) for name in names or tuple(self.members)]
        return all(report is not None and report.desired_seq >= seq for report in found)

    @contextmanager
    def load(self, name: str, *, clients: int = 2, pause_s: float = 0.02) -> Iterator[Load]:
        """Clients that ask the gateway of a host all the time."""
        stop, seen, lock, member = threading.Event(), Load(), threading.Lock(), self.members[name]

        def client() -> None:
            while not stop.wait(pause_s):
                began = time.monotonic()
                try:
                    status, body = member.ask()
                    error = "" if status == 200 else f"{status} {body}"
                except (OSError, http.client.HTTPException) as failure:
                    error = repr(failure)
                with lock:
                    seen.slowest_s = max(seen.slowest_s, time.monotonic() - began)
                    if error:
                        seen.errors.append(error)
                    else:
                        seen.answered += 1

        with beside(*[client] * clients, stop=stop):
            yield seen


@contextmanager
def cluster(
    folder: Path,
    *names: str,
    prefix: str,
    beside: Callable[[ExitStack, Host], Mapping[str, str]] = lambda _ends, _host: {},
) -> Iterator[Cluster]:
    """Agents on hosts of these names, and a host with the store. Nothing is desired yet. `beside`: starts more on the
    host of the store, and returns variables that agents have for it."""
    authority = Authority()
    with ExitStack() as ends:
        network = ends.enter_context(hosts(*names, "store", prefix=prefix))
        place = network["store"]
        with place.inside():
            variables = ends.enter_context(running_seaweedfs(folder / "s3", address=place.address))
        variables = {**variables, **beside(ends, place)}
        known = dict(os.environ)
        os.environ.update(variables)
        ends.callback(_restore, known)
        with place.inside():
            objects, store = open_objects(variables["SERIN_STORE"]), Store(variables["SERIN_STORE"])
        members = {}
        for name in names:
            host, home = network[name], folder / name
            _write_certificates(folder / f"{name}-tls", authority)
            own = {**os.environ, "SERIN_HOME": str(home), "SERIN_HOST": name}
            members[name] = Member(host, home, host.free_port(), host.free_port(), own)
            members[name].start()
        made = Cluster(members, network, place, objects, store, variables, folder)
        try:
            yield made
        finally:
            for member in members.values():
                if member.process is not None:
                    member.process.terminate()
            for member in members.values():
                if member.process is not None:
                    end(member.process, grace_s=60.0)


def _write_certificates(folder: Path, authority: Authority) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    authority.pair().write(folder / "peer.pem", folder / "peer.key")
    (folder / "ca.pem").write_bytes(authority.certificate)


def _restore(known: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(known)
