"""Three hosts with agents over an object store, each in a network namespace, and two controllers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from serin.store.store import Store
from tests.cluster.namespaces import Host, end
from tests.cluster.part import need
from tests.cluster.serving_hosts import SERIN, Cluster, cluster
from tests.parity.place import Place

_COMMAND_S = 900.0


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

    def serin_done(self, words: Sequence[str], home: Path | None = None) -> tuple[int, str, str]:
        member = self.made.members["a"]
        env = {**member.variables, **({} if home is None else {"SERIN_HOME": str(home)})}
        done = member.host.run([*SERIN, *words], env=env, check=False, within_s=_COMMAND_S)
        return done.returncode, done.stdout, done.stderr

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


@contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    need("namespaces")
    with ExitStack() as ends:
        made = ends.enter_context(cluster(folder, "a", "b", "c", prefix="198.18.40"))
        controllers = []
        for number, host in enumerate((made.network["c"], made.store_host)):
            controllers.append(Controller(host, folder / f"controller-{number}"))
            controllers[-1].start()
            ends.callback(lambda each: end(each.process), controllers[-1])
        made.until(lambda: all(made.report(name) for name in "abc"), what="all hosts report")
        yield Hosts(made, controllers, folder)
