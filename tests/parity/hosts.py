"""Three hosts with agents over an object store, each in a network namespace, and two controllers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from serin.store.store import Store
from tests.cluster.namespaces import end
from tests.cluster.part import need
from tests.cluster.serving_hosts import SERIN, Cluster, cluster
from tests.parity.place import Place

_COMMAND_S = 900.0


class Hosts(Place):
    """Commands run on host `a`, where an agent runs as well."""

    name = "hosts"

    def __init__(self, made: Cluster, folder: Path) -> None:
        super().__init__(folder)
        self.made = made
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
        for number, host in enumerate((made.network["c"], made.store_host)):
            own = {**os.environ, "SERIN_HOME": str(folder / f"controller-{number}"), "SERIN_HOST": host.name}
            log = folder / f"controller-{number}.log"
            ends.callback(end, host.popen([*SERIN, "controller"], log=log, env=own))
        made.until(lambda: all(made.report(name) for name in "abc"), what="all hosts report")
        yield Hosts(made, folder)
