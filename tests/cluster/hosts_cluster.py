"""Three hosts a, b and c with a common object store on a fourth."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.namespaces import Host, hosts
from tests.cluster.part import need
from tests.cluster.seaweedfs import running_seaweedfs
from tests.cluster.small_pipeline import host_environment


@dataclass(frozen=True, slots=True)
class Cluster:
    network: dict[str, Host]
    store: dict[str, str]
    folder: Path

    def environment(self, name: str, **more: str) -> dict[str, str]:
        """What commands see on a host, which has its own SERIN_HOME."""
        return {**host_environment(self.folder / f"home-{name}", self.store), **more}


@contextmanager
def three_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The test itself uses the same store, within `network["store"].inside()`."""
    need("namespaces")
    need("seaweedfs")
    with ExitStack() as stack:
        network = stack.enter_context(hosts("a", "b", "c", "store", prefix="198.18.20"))
        with network["store"].inside():
            store = stack.enter_context(running_seaweedfs(folder / "s3", address=network["store"].address))
        for name, value in store.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SERIN_HOME", str(folder / "home-test"))
        yield Cluster(network, store, folder)
