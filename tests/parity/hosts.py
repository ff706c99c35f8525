"""Three hosts with agents over an object store, each in a network namespace, and two controllers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from serin.store.store import Store
from tests.cluster.events_server import EventsServer
from tests.cluster.namespaces import Host, end, wait_for
from tests.cluster.part import need
from tests.cluster.serving_hosts import SERIN, Cluster, cluster
from tests.cluster.small_pipeline import PREFECT
from tests.parity.place import Place

_COMMAND_S = 900.0
_LOGIN = "serin:only-for-this-test"


@dataclass
class Controller:
    """Restarted by nobody but its owner."""

    host: Host
    home: Path
    process: subprocess.Popen[str] = field(init=False)

    def start(self) -> None:
        own = {**os.environ, "SERIN_HOME": str(self.home), "SERIN_HOST": self.host.name}
        self.process = self.host.popen([*SERIN, "controller"], log=self.home.with_suffix(".log"), env=own)


class Hosts(Place):
    """Commands run on host `a`, where an agent runs as well."""

    name = "hosts"

    def __init__(self, made: Cluster, controllers: list[Controller], folder: Path) -> None:
        super().__init__(folder)
        self.made, self.controllers = made, controllers
        self.address = made.store_host.address

    def serin_done(
        self, words: Sequence[str], home: Path | None = None, **variables: str
    ) -> tuple[int, str, str]:
        member = self.made.members["a"]
        env = {**member.variables, **({} if home is None else {"SERIN_HOME": str(home)}), **variables}
        done = member.host.run([*SERIN, *words], env=env, check=False, within_s=_COMMAND_S)
        return done.returncode, done.stdout, done.stderr

    @contextmanager
    def prefect(self) -> Iterator[dict[str, str]]:
        """The server is on host `c`, and its workers are on `b` and `c`, in homes of their own."""
        c = self.made.network["c"]
        url = f"http://{c.address}:{c.free_port()}/api"
        named = {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": _LOGIN, "DO_NOT_TRACK": "1"}
        host, _, port = url.removeprefix("http://").removesuffix("/api").partition(":")
        own = {"PREFECT_HOME": str(self.folder / "prefect"), "PREFECT_SERVER_API_AUTH_STRING": _LOGIN}
        with ExitStack() as ends:

            def start(name: str, place: Host, command: Sequence[str], **more: str) -> subprocess.Popen[str]:
                home = str(self.folder / f"workers-{place.name}")
                env = {
                    **os.environ,
                    **named,
                    "SERIN_HOME": home,
                    "SERIN_HOST": f"worker-{place.name}",
                    **more,
                }
                process = place.popen(list(command), log=self.folder / f"{name}.log", env=env)
                ends.callback(end, process)
                return process

            server = start("prefect", c, [*PREFECT, "server", "start", "--host", host, "--port", port], **own)
            with c.inside():
                wait_for(lambda: _answers(f"{url}/health"), within_s=300, watching=[server])
            self.ask_for("deploy", **named)
            start("worker-cpu", self.made.network["b"], [*SERIN, "worker", "cpu"])
            start("worker-gpu", c, [*SERIN, "worker", "gpu"])
            yield named

    @property
    def gateways(self) -> list[str]:
        return [f"{each.host.address}:{each.port}" for each in self.made.members.values()]

    @property
    def store(self) -> Store:
        return self.made.store

    def inside(self, gateway: str = "") -> AbstractContextManager[None]:
        found = [
            each.host for each in self.made.members.values() if gateway.startswith(f"{each.host.address}:")
        ]
        return (found[0] if found else self.made.store_host).inside()

    def repositories(self, release: str) -> list[Path]:
        return [each.home / "releases" / release / "repository" for each in self.made.members.values()]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _start_events(folder: Path, ends: ExitStack, host: Host) -> Mapping[str, str]:
    """The Valkey that keeps events for all hosts."""
    server = EventsServer(folder, host=host, port=host.free_port())
    server.start()
    ends.callback(server.close)
    return server.variables


@contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    need("namespaces")
    need("valkey")
    with ExitStack() as ends:
        events = partial(_start_events, folder / "events")
        made = ends.enter_context(cluster(folder, "a", "b", "c", prefix="198.18.40", beside=events))
        controllers = []
        for number, host in enumerate((made.network["c"], made.store_host)):
            controllers.append(Controller(host, folder / f"controller-{number}"))
            controllers[-1].start()
            ends.callback(lambda each: end(each.process), controllers[-1])
        made.until(lambda: all(made.report(name) for name in "abc"), what="all hosts report")
        yield Hosts(made, controllers, folder)
