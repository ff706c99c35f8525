"""What the credential of CI may do in a store, with the policy of the docs on a real S3 server (SeaweedFS)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.errors import StoreError
from serin.formats.cluster.leader import KEY
from serin.store.open import open_objects
from serin.store.store import Store
from tests.architecture.sources import ROOT
from tests.cluster.documented_rights import URL, ci_rights
from tests.cluster.seaweedfs import running_seaweedfs
from tests.kit.commands import serin
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

FORBIDDEN = [
    "rollouts/inbox/1.json",
    "rollouts/approvals/1.json",
    "rollouts/delays/decisions/000000000001.json",
    "cluster/leader.json",
    "cluster/desired/000000000001.json",
    "models/delays/aliases.json",
    "models/delays/signatures/1.json",
    "models/delays/versions/2/attempt/model.onnx",
    "published/models/delays/versions/2.json",
    "policy.json",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("seaweedfs") / "server"
    with running_seaweedfs(folder, others={"ci": ci_rights()}) as variables:
        yield variables


@pytest.fixture
def as_ci(server: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with a version and a leader; from then on this process is CI."""
    for name, value in (server | {"SERIN_STORE": URL}).items():
        monkeypatch.setenv(name, value)
    owner = Store(URL, cache=home / "owner")
    if not owner.versions(MODEL):
        bundles.publish(owner, bias=0.0)
    owner.shared_files().put(KEY, b"{}")
    assert open_objects(URL).keys("rollouts/") == []
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ci")
    return URL


def test_ci_writes_packages_and_reads_versions(as_ci: str, home: Path) -> None:
    objects = open_objects(as_ci)
    objects.create("packages/abc/package.json", b"{}")
    found = objects.read("packages/abc/package.json")
    assert found is not None
    assert objects.read("packages/none/package.json") is None
    assert Store(as_ci, cache=home / "ci").bundle(MODEL, 1).version == 1
    assert "delays" in serin("models", "list")
    assert "no rollouts yet" in serin("rollout", "status")


def test_ci_starts_no_rollout(as_ci: str, server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = serin(
        "rollout", "start", MODEL, "--spec", str(ROOT / "examples" / "flights" / "spec.yaml"), code=1
    )
    assert "AccessDenied" in said
    assert "rollouts/inbox/" in said
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server["AWS_ACCESS_KEY_ID"])
    assert open_objects(as_ci).keys("rollouts/") == []


@pytest.mark.parametrize("key", FORBIDDEN)
def test_ci_writes_nothing_that_is_served_or_decides(as_ci: str, key: str) -> None:
    objects = open_objects(as_ci)
    with pytest.raises(StoreError, match="AccessDenied"):
        objects.put(key, b"{}")
    with pytest.raises(StoreError, match="AccessDenied"):
        objects.remove(key)
