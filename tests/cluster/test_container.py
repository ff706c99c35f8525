"""A container of the test kubelet, without a control plane: what it sees, and how its probes run."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.container import ROOT, Container, Place
from tests.cluster.namespaces import wait_for
from tests.cluster.part import need
from tests.cluster.pod_network import PodNetwork
from tests.cluster.probes import Probes

CONTEXT = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "readOnlyRootFilesystem": True}
COVERING = [str(parent) for parent in ROOT.parents if parent != Path("/")]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    need("namespaces")
    network = PodNetwork("198.18.61", "cont")
    with tempfile.TemporaryDirectory(prefix="serin-pod-") as name, network.up(lambda _: None):
        folder = Path(name)
        for path in (folder, folder / "volume"):
            path.mkdir(exist_ok=True)
            path.chmod(0o777)
        space, address = network.add()
        yield Place(
            space=space, address=address, hostname="pod", folder=folder, volumes={"volume": folder / "volume"},
            resolver=network.gateway,
        )  # fmt: skip


def begin(place: Place, command: list[str], *, over: str, **more: Any) -> Container:
    spec = {
        "name": "main",
        "command": command,
        "volumeMounts": [{"name": "volume", "mountPath": over}],
        **more,
    }
    pod = {"metadata": {"namespace": "test", "name": "pod"}, "spec": {"securityContext": CONTEXT}}
    return Container(spec, pod, place, {"PYTHONDONTWRITEBYTECODE": "1"}, place.folder / "main.log")


@pytest.mark.parametrize("over", COVERING)
def test_it_runs_a_clone_that_a_volume_covers(place: Place, over: str) -> None:
    container = begin(place, ["/opt/serin/bin/python", "-c", "import serin, yaml"], over=over)
    code = wait_for(
        lambda: (container.exit_code(),) if container.exit_code() is not None else None, within_s=120
    )
    assert code == (0,), container.log.read_text()


def test_a_probe_runs_its_command_in_the_container_as_its_user(place: Place) -> None:
    """The file of the first is on the volume, and the root cannot be written."""
    container = begin(place, ["sh", "-c", "touch /made/here; exec sleep 600"], over="/made")
    try:
        file = place.folder / "volume" / "here"
        wait_for(file.exists, within_s=60)
        assert file.stat().st_uid == 10001
        for command, passes in (
            (["test", "-e", "/made/here"], True),
            (["test", "-e", "/made/there"], False),
            (["sh", "-c", 'test "$(id -u):$(hostname)" = 10001:pod'], True),
            (["touch", "/etc/written"], False),
        ):
            probe = {"readinessProbe": {"exec": {"command": command}}}
            assert Probes(probe, place.address, container).ready() == passes, command
    finally:
        container.kill()
