"""Three hosts a, b and c with a common object store on a fourth, and a Prefect server on one of them."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from serin.prefect.rest_api import answers
from tests.cluster.namespaces import Host, hosts, wait_for
from tests.cluster.part import need
from tests.cluster.seaweedfs import running_seaweedfs
from tests.cluster.small_pipeline import PREFECT, host_environment

LOGIN = "serin:only-for-this-test"
"""Of the Prefect server."""


@dataclass(frozen=True, slots=True)
class Cluster:
    network: dict[str, Host]
    store: dict[str, str]
    folder: Path

    def environment(self, name: str, **more: str) -> dict[str, str]:
        """What commands see on a host, which has its own SERIN_HOME."""
        return {**host_environment(self.folder / f"home-{name}", self.store), **more}


@contextmanager
def three_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, others: Mapping[str, Sequence[str]] | None = None
) -> Iterator[Cluster]:
    """The test itself uses the same store, within `network["store"].inside()`. `others`: see running_seaweedfs."""
    need("namespaces")
    need("seaweedfs")
    with ExitStack() as stack:
        network = stack.enter_context(hosts("a", "b", "c", "store", prefix="198.18.20"))
        with network["store"].inside():
            address = network["store"].address
            store = stack.enter_context(running_seaweedfs(folder / "s3", address=address, others=others))
        for name, value in store.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SERIN_HOME", str(folder / "home-test"))
        yield Cluster(network, store, folder)


def start_prefect(
    host: Host, url: str, environment: Mapping[str, str], *, log: Path
) -> subprocess.Popen[str]:
    """A Prefect server on a host, once it answers at `url`, an address of that host."""
    address, _, port = url.removeprefix("http://").removesuffix("/api").partition(":")
    server = host.popen(
        [*PREFECT, "server", "start", "--host", address, "--port", port],
        env={
            **environment,
            "PREFECT_SERVER_API_AUTH_STRING": LOGIN,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        },
        log=log,
    )
    with host.inside():
        wait_for(lambda: answers(url), within_s=300, watching=[server], what="the Prefect server")
    return server
