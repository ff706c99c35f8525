"""A Prefect server and a worker on one host, the person on another: what both reach is an object store and an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from serin.prefect.rest_api import Api
from tests.cluster.hosts_cluster import LOGIN, three_hosts
from tests.cluster.namespaces import end
from tests.cluster.senders import Senders
from tests.kit.index import Gate, served_index
from tests.ways.place import COMMAND_S, Done, Elsewhere, wait_for_deployments
from tests.ways.projects import write_index


class Host(Elsewhere):
    name = "host"

    def __init__(self, senders: Senders) -> None:
        store = {**senders.cluster.store, **senders.variables}
        super().__init__(senders.disks["c"], Api(senders.url, LOGIN), store)
        self._network = senders.cluster.network

    def run(self, *command: str | Path, cwd: Path, **variables: str) -> Done:
        env = {**self.variables, **variables}
        done = self._network["c"].run(command, env=env, cwd=cwd, within_s=COMMAND_S, check=False)
        return Done(done.returncode, done.stderr + done.stdout)

    def inside(self) -> AbstractContextManager[None]:
        return self._network["store"].inside()


@contextmanager
def host(folder: Path) -> Iterator[Host]:
    write_index(folder / "index")
    gate = Gate()
    gate.opened.set()
    with ExitStack() as ends:
        cluster = ends.enter_context(three_hosts(folder, ends.enter_context(pytest.MonkeyPatch.context())))
        store = cluster.network["store"]
        with store.inside():
            url = ends.enter_context(served_index(folder / "index", gate, store.address))
        senders = Senders(cluster, UV_DEFAULT_INDEX=url)
        ends.callback(lambda: [end(process) for process in reversed(senders.processes)])
        senders.hide_disks()
        senders.start()
        place = Host(senders)
        wait_for_deployments(place)
        place.stop_schedules()
        yield place
