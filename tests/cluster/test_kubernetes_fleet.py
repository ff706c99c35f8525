"""The fleet's contract with releases as Kubernetes Deployments, under the rights of the controller's account."""

import signal
from collections.abc import Iterator

import pytest

from serin.cluster.kubernetes.fleet import KubernetesFleet
from serin.cluster.kubernetes.release_objects import RELEASE_LABEL, ReleaseTemplate, object_name
from serin.errors import KubernetesRefused, ObjectNotOurs
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.cluster.kubernetes_cluster import MANIFESTS, Cluster, cluster_with_home, controllers_namespace
from tests.fleet_contract import MODEL, FleetContract, Scene
from tests.unit.serving import bundles

SPACE = "serin-releases"
BASELINE = Release(model=MODEL, version=1, baseline=True)  # the contract leaves it alone
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{SPACE}/deployments"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_with_home(tmp_path_factory) as running:
        running.add_settings()
        yield running


@pytest.fixture(scope="module")
def store(cluster: Cluster) -> Store:
    found = Store.open()
    for bias in (0.0, 1.0):
        bundles.publish(found, bias=bias)
    return found


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, store: Store) -> KubernetesFleet:
    template = ReleaseTemplate.read(MANIFESTS / "base" / "release.yaml")
    template.deployment["spec"]["replicas"] = 1
    return KubernetesFleet(controllers_namespace(cluster.plane, SPACE), template, store, reach=cluster.reach)


@pytest.fixture(scope="module")
def scene(cluster: Cluster, store: Store, fleet: KubernetesFleet) -> Scene:
    def kill(release: Release) -> None:
        (pod,) = cluster.kubelet.pods_with(SPACE, {RELEASE_LABEL: object_name(release)})
        pod.containers["triton"].signal(signal.SIGKILL)

    return Scene(fleet=fleet, store=store, kill=kill, reach=cluster.reach, within_s=300.0)


class TestKubernetesFleet(FleetContract):
    """All of it."""


def test_an_object_that_somebody_else_made_under_a_release_s_name_is_left_alone(
    cluster: Cluster, fleet: KubernetesFleet
) -> None:
    pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "c"}]}}
    theirs = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": BASELINE.name},
        "spec": {"replicas": 0, "selector": {"matchLabels": {"a": "b"}}, "template": pod},
    }
    cluster.plane.call("POST", DEPLOYMENTS, theirs)
    try:
        for action in (fleet.start, fleet.stop):
            with pytest.raises(ObjectNotOurs, match="was not made by Serin"):
                action(BASELINE)
        assert list(fleet.running()) == []
    finally:
        cluster.plane.kubectl("--namespace", SPACE, "delete", "deployment", BASELINE.name, "--wait")


def test_a_stale_resource_version_is_refused(cluster: Cluster, fleet: KubernetesFleet) -> None:
    fleet.start(BASELINE)
    namespace = controllers_namespace(cluster.plane, SPACE)
    found = namespace.get("deployments", BASELINE.name)
    assert found is not None
    note = {"metadata": {"annotations": {"a": "1"}}}
    namespace.merge("deployments", BASELINE.name, note)
    stale = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"], "annotations": {"a": "2"}}}
    with pytest.raises(KubernetesRefused) as refused:
        namespace.merge("deployments", BASELINE.name, stale)
    assert refused.value.status == 409
    fleet._restart(BASELINE, found)  # of two controllers the later one changes nothing
    now = namespace.get("deployments", BASELINE.name)
    assert now is not None
    assert now["metadata"]["annotations"]["a"] == "1"
    assert "serin.dev/restarted" not in now["spec"]["template"]["metadata"]["annotations"]
    fleet.stop(BASELINE)
