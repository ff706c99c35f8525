"""Manifests and rights against a real API server; releases, rollouts and pipelines with the test kubelet."""

from collections.abc import Iterator

import kubernetes_validate
import pytest

from tests.cluster.kubernetes import ControlPlane, control_plane
from tests.cluster.kubernetes_cluster import MANIFESTS, NOT_IN_THE_SERVER, built

OVERLAYS = ("cpu", "gpu")
SCHEMA = "1.36"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as running:
        yield running


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_of_an_overlay_fits_its_schema(overlay: str) -> None:
    for document in built(MANIFESTS / "overlays" / overlay):
        kubernetes_validate.validate(document, SCHEMA, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_takes_every_object_that_it_knows_and_applying_again_changes_nothing(
    plane: ControlPlane, overlay: str
) -> None:
    documents = built(MANIFESTS / "overlays" / overlay)
    known = [each for each in documents if each["apiVersion"] not in NOT_IN_THE_SERVER]
    assert {each["kind"] for each in documents if each not in known} == {"PodDisruptionBudget"}
    plane.apply(known)
    before = _versions(plane)
    plane.apply(known)
    changed = {key for key, version in _versions(plane).items() if before.get(key) != version}
    assert not changed


def _versions(plane: ControlPlane) -> dict[str, int]:
    """The generation of each Deployment and StatefulSet: it grows with each change of what is wanted."""
    kinds = ("deployments", "statefulsets")
    found = [
        each
        for kind in kinds
        for each in plane.call("GET", f"/apis/apps/v1/namespaces/serin/{kind}")["items"]
    ]
    return {each["metadata"]["name"]: each["metadata"]["generation"] for each in found}


CONTROLLER, WORKER = ("serin", "controller"), ("serin", "worker")
RELEASES, STAGES = "serin-releases", "serin-stages"
ALLOWED = [
    (CONTROLLER, "create", "deployments.apps", RELEASES),
    (CONTROLLER, "patch", "deployments.apps", RELEASES),
    (CONTROLLER, "delete", "services", RELEASES),
    (CONTROLLER, "list", "pods", RELEASES),
    (WORKER, "create", "jobs.batch", STAGES),
    (WORKER, "watch", "pods", STAGES),
    (WORKER, "get", "pods/log", STAGES),
]
REFUSED = [
    *[
        (CONTROLLER, verb, "secrets", space)
        for verb in ("get", "list")
        for space in (RELEASES, "serin", STAGES)
    ],
    (CONTROLLER, "create", "deployments.apps", "serin"),
    (CONTROLLER, "delete", "pods", RELEASES),
    (CONTROLLER, "create", "pods", RELEASES),
    (CONTROLLER, "create", "pods/exec", RELEASES),
    (CONTROLLER, "create", "jobs.batch", STAGES),
    (CONTROLLER, "create", "rolebindings.rbac.authorization.k8s.io", RELEASES),
    *[(WORKER, "get", "secrets", space) for space in (STAGES, "serin", RELEASES)],
    (WORKER, "create", "jobs.batch", "serin"),
    (WORKER, "create", "pods", STAGES),
    (WORKER, "create", "pods/exec", STAGES),
    (WORKER, "patch", "deployments.apps", RELEASES),
    (("serin-releases", "release"), "get", "pods", RELEASES),
    (("serin-stages", "stage"), "get", "pods", STAGES),
]


def test_accounts_have_the_rights_that_they_need_and_no_others(plane: ControlPlane) -> None:
    plane.apply(
        [
            each
            for each in built(MANIFESTS / "overlays" / "cpu")
            if each["apiVersion"] not in NOT_IN_THE_SERVER
        ]
    )
    assert [each for each in ALLOWED if not _may(plane, *each)] == []
    assert [each for each in REFUSED if _may(plane, *each)] == []


def _may(plane: ControlPlane, account: tuple[str, str], verb: str, resource: str, namespace: str) -> bool:
    asked, _, group = resource.partition(".")
    name, _, part = asked.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": part}
    user = f"system:serviceaccount:{account[0]}:{account[1]}"
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": attributes},
    }
    review = plane.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    return bool(review["status"]["allowed"])


def test_a_token_of_the_controller_is_refused_where_it_has_no_right(plane: ControlPlane) -> None:
    with plane.client(plane.token(*CONTROLLER)) as api:
        assert api.get(f"/apis/apps/v1/namespaces/{RELEASES}/deployments").status_code == 200
        for path in (
            f"/api/v1/namespaces/{RELEASES}/secrets",
            "/api/v1/namespaces/serin/secrets",
            "/apis/apps/v1/namespaces/serin/deployments",
            "/api/v1/nodes",
        ):
            assert api.get(path).status_code == 403, path
