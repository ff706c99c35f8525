"""The fleet's contract with releases as processes of this machine (tests/cluster has the one of Kubernetes)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.serving.children import Children
from serin.serving.triton.releases import Releases
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.fleet_contract import FleetContract, Scene
from tests.signals import hit
from tests.unit.serving import bundles


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder: Path = tmp_path_factory.mktemp("fleet")
    store = Store(str(folder / "store"))
    for bias in (0.0, 1.0):
        bundles.publish(store, bias=bias)
    with Children() as host:

        def kill(release: Release) -> None:
            pid = host.pid(release.name)
            assert pid is not None
            hit(pid)

        yield Scene(fleet=Releases(folder / "releases", host=host, store=store), store=store, kill=kill)


class TestLocalFleet(FleetContract):
    """All of it."""
