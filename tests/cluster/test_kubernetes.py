"""Manifests and rights against a real API server; releases, rollouts and pipelines with the test kubelet."""

import copy
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest

from serin.cluster.kubernetes.autoscaler import VERSIONS
from serin.cluster.kubernetes.fleet import KubernetesFleet
from serin.cluster.kubernetes.release_objects import ReleaseTemplate
from serin.errors import KubernetesRefused
from serin.store.store import Store
from tests.cluster.kubernetes import ControlPlane, control_plane
from tests.cluster.kubernetes_cluster import MANIFESTS, NOT_IN_THE_SERVER, built, controllers_namespace
from tests.fleet_contract import V1
from tests.kit.waiting import until
from tests.unit.serving import bundles
from tests.unit.test_kubernetes_manifests import ALL
from tests.unit.test_kubernetes_manifests import MADE as MADE_IN_CODE

OVERLAYS = ("cpu", "gpu")
SCHEMA = "1.36"
MADE = dict(MADE_IN_CODE)


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
    known = _known(overlay)
    lost = [each["kind"] for each in built(MANIFESTS / "overlays" / overlay) if each not in known]
    assert set(lost) == {"PodDisruptionBudget"}
    plane.apply(known)
    before = _versions(plane)
    plane.apply(known)
    changed = {key for key, version in _versions(plane).items() if before.get(key) != version}
    assert not changed


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_kustomize_makes_is_what_the_tests_of_the_files_look_at(overlay: str) -> None:
    """Those walk over files, so that they need no kustomize: nothing may be changed or added on the way."""

    def key(found: dict[str, Any]) -> tuple[str, str, str]:
        return found["kind"], found["metadata"].get("namespace", ""), found["metadata"]["name"]

    rendered = {key(each): each for each in built(MANIFESTS / "overlays" / overlay)}
    files = {
        key(each): each for where, each in ALL if where.startswith("base/") and each not in MADE.values()
    }
    generated = {each for each in rendered if each not in files}
    assert {kind for kind, _, _ in generated} == {"ConfigMap"}
    assert {each: rendered[each] for each in files} == files
    (template,) = [each["data"] for name, each in rendered.items() if name[2] == "serin-release-template"]
    folder = MANIFESTS / ("base" if overlay == "cpu" else "overlays/gpu")
    assert template == {"release.yaml": (folder / "release.yaml").read_text()}
    (pools,) = [each["data"] for name, each in rendered.items() if name[2] == "serin-pools"]
    own = {"cpu-pool.json": MANIFESTS / "base" / "cpu-pool.json", "gpu-pool.json": folder / "gpu-pool.json"}
    assert pools == {name: path.read_text() for name, path in own.items()}


def test_the_overlay_of_the_docs_can_be_built_and_opens_the_port_of_the_store(tmp_path: Path) -> None:
    page = (MANIFESTS.parents[1] / "docs" / "how-to" / "kubernetes.md").read_text()
    overlay, patches = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    base = os.path.relpath(MANIFESTS / "overlays" / "gpu", tmp_path)
    text = (overlay + patches).replace("../serin/deployments/kubernetes/overlays/gpu", base)
    (tmp_path / "kustomization.yaml").write_text(text)
    shutil.copy(MANIFESTS / "overlays" / "gpu" / "release.yaml", tmp_path)
    for pool in ("cpu-pool.json", "gpu-pool.json"):
        shutil.copy(MANIFESTS / "base" / pool, tmp_path)
    documents = built(tmp_path)
    opened = {
        each["metadata"]["name"]
        for each in documents
        if {"ports": [{"protocol": "TCP", "port": 9000}]} in each.get("spec", {}).get("egress", ())
    }
    assert opened == {"api-server", "gateway", "releases", "stages"}
    assert "registry.example/serin-serving:0.1.0" in str(documents)
    assert {
        each["data"]["SERIN_STORE"] for each in documents if each["metadata"]["name"] == "serin-settings"
    } == {"s3://my-bucket/serin"}


PATHS = {
    "Deployment": "/apis/apps/v1",
    "Service": "/api/v1",
    "Job": "/apis/batch/v1",
    "HorizontalPodAutoscaler": f"/apis/{VERSIONS[1]}",
}


def test_the_server_takes_what_controllers_and_workers_make(plane: ControlPlane) -> None:
    plane.apply(_known())
    for found in MADE.values():
        space, kind = found["metadata"]["namespace"], found["kind"]
        if kind == "HorizontalPodAutoscaler":
            found = {**found, "apiVersion": VERSIONS[1]}
        plane.call(
            "POST",
            f"{PATHS[kind]}/namespaces/{space}/{kind.lower()}s",
            found,
            dryRun="All",
            fieldValidation="Strict",
        )


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
RIGHTS = {
    (CONTROLLER, RELEASES, "deployments.apps"): {"get", "list", "create", "patch", "delete"},
    (CONTROLLER, RELEASES, "services"): {"get", "create", "patch", "delete"},
    (CONTROLLER, RELEASES, "pods"): {"list"},
    (CONTROLLER, RELEASES, "horizontalpodautoscalers.autoscaling"): {"get", "create", "patch", "delete"},
    (WORKER, STAGES, "jobs.batch"): {"get", "list", "watch", "create", "delete"},
    (WORKER, STAGES, "pods"): {"list", "watch"},
    (WORKER, STAGES, "pods/log"): {"get"},
}
ACCOUNTS = (
    CONTROLLER,
    WORKER,
    (RELEASES, "release"),
    (STAGES, "stage"),
    ("serin", "default"),
    (RELEASES, "default"),
)
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
RESOURCES = (
    "deployments.apps", "services", "pods", "pods/log", "pods/exec", "jobs.batch", "jobs.batch/status", "secrets",
    "configmaps", "serviceaccounts/token", "horizontalpodautoscalers.autoscaling", "nodes",
    "rolebindings.rbac.authorization.k8s.io",
)  # fmt: skip


def _known(overlay: str = "cpu") -> list[dict[str, Any]]:
    documents = built(MANIFESTS / "overlays" / overlay)
    return [each for each in documents if each["apiVersion"] not in NOT_IN_THE_SERVER]


def test_accounts_have_the_rights_that_they_use_and_no_others(plane: ControlPlane) -> None:
    plane.apply(_known())
    asked = [
        (account, namespace, resource)
        for account in ACCOUNTS
        for namespace in ("serin", RELEASES, STAGES)
        for resource in RESOURCES
    ]
    with plane.client() as api:
        found = {each: {verb for verb in VERBS if _may(api, verb, *each)} for each in asked}
    assert {each: verbs for each, verbs in found.items() if verbs} == RIGHTS


def _may(api: httpx.Client, verb: str, account: tuple[str, str], namespace: str, resource: str) -> bool:
    asked, _, part = resource.partition("/")
    name, _, group = asked.partition(".")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": part}
    spec = {"user": f"system:serviceaccount:{':'.join(account)}", "resourceAttributes": attributes}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = api.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json=body)
    return bool(answer.raise_for_status().json()["status"]["allowed"])


@pytest.fixture(scope="module")
def fleet(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> KubernetesFleet:
    """With the rights of the controller's account. Nothing runs the pods."""
    plane.apply(_known())
    store = Store(str(tmp_path_factory.mktemp("store")))
    bundles.publish(store, bias=0.0, spec="serving: {replicas: {min: 2, max: 5}}\n")
    template = ReleaseTemplate.read(MANIFESTS / "base" / "release.yaml")
    return KubernetesFleet(controllers_namespace(plane, RELEASES), template, store)


def _live(fleet: KubernetesFleet) -> None:
    """A release's life, as far as it is the API server's."""
    fleet.start(V1)
    fleet.start(V1)
    assert list(fleet.running()) == [V1]
    fleet.stop(V1)
    fleet._wait_until_gone(V1)


def test_the_controller_s_rights_are_enough_for_a_release(fleet: KubernetesFleet) -> None:
    _live(fleet)


def test_the_autoscaler_owns_the_replicas_of_a_release_with_a_range(
    plane: ControlPlane, fleet: KubernetesFleet
) -> None:
    """The server knows autoscalers as v2beta2 alone, and the real controller raises one replica to the least."""
    place = f"/apis/apps/v1/namespaces/{RELEASES}/deployments/{V1.name}"
    scaler = f"/apis/{VERSIONS[1]}/namespaces/{RELEASES}/horizontalpodautoscalers/{V1.name}"

    def replicas() -> int:
        return int(plane.call("GET", place)["spec"]["replicas"])

    fleet.start(V1)
    try:
        found = plane.call("GET", scaler)
        assert (found["spec"]["minReplicas"], found["spec"]["maxReplicas"]) == (2, 5)
        assert found["metadata"]["labels"] == plane.call("GET", place)["metadata"]["labels"]
        until(lambda: replicas() == 2, "two replicas", within_s=120, every_s=0.2)
        plane.call("PATCH", f"{place}/scale", {"spec": {"replicas": 4}}, kind="application/merge-patch+json")
        fleet.start(V1)
        assert replicas() == 4
    finally:
        fleet.stop(V1)
        fleet._wait_until_gone(V1)
    with plane.client() as api:
        assert api.get(scaler).status_code == 404


@pytest.mark.parametrize(
    ("resource", "verb"),
    [(name, verb) for (who, _, name), verbs in RIGHTS.items() if who == CONTROLLER for verb in sorted(verbs)],
)
def test_without_one_of_the_controller_s_rights_a_release_fails(
    plane: ControlPlane, fleet: KubernetesFleet, resource: str, verb: str
) -> None:
    def wait(allowed: bool) -> None:
        with plane.client() as api:
            asked = (verb, CONTROLLER, RELEASES, resource)
            until(
                lambda: _may(api, *asked) == allowed,
                f"{verb} {resource}: {allowed}",
                within_s=30,
                every_s=0.1,
            )

    (role,) = [
        each for each in _known() if (each["kind"], each["metadata"]["name"]) == ("Role", "controller")
    ]
    less = copy.deepcopy(role)
    for rule in less["rules"]:
        if rule["resources"] == [resource.partition(".")[0]]:
            rule["verbs"].remove(verb)
    less["rules"] = [rule for rule in less["rules"] if rule["verbs"]]
    plane.apply([less])
    wait(False)
    try:
        with pytest.raises(KubernetesRefused) as refused:
            _live(fleet)
        assert refused.value.status == 403
    finally:
        plane.apply([role])
        wait(True)
        fleet.stop(V1)
        fleet._wait_until_gone(V1)


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
