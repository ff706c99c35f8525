"""Releases as Kubernetes Deployments, and fleets of which two versions share clients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from serin.cluster.combined_fleet import CombinedFleet
from serin.cluster.kubernetes.autoscaler import (
    IN_FLIGHT,
    PER_SECOND,
    VERSIONS,
    build_autoscaler,
    targets,
)
from serin.cluster.kubernetes.release_objects import (
    RELEASE_LABEL,
    ReleaseTemplate,
    build_deployment,
    build_service,
    object_name,
    release_of,
    service_endpoint,
)
from serin.cluster.kubernetes.release_state import Restarts, count_restarts, deployment_state, pods_of
from serin.errors import BackendRefused, RequestsDiffer, TemplateUnfit
from serin.formats.schema import InputColumn, OutputTensor, Schema
from serin.serving.external import External
from serin.serving.triton.repository import Capacity, gpus_wanted
from serin.spec.serving import ReplicaRange, ServingSpec
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.fakes.rollout import FakeFleet
from tests.unit.serving import bundles

FOLDER = Path(__file__).resolve().parents[3] / "deployments" / "kubernetes"
V3 = Release(model="flights", version=3)


@pytest.fixture
def template() -> ReleaseTemplate:
    return ReleaseTemplate.read(FOLDER / "overlays" / "gpu" / "release.yaml")


def test_a_long_name_is_cut_and_stays_different_from_others() -> None:
    names = {
        object_name(Release(model="m" * 63, version=version, baseline=each))
        for version in (1, 2)
        for each in (True, False)
    }
    assert len(names) == 4
    assert all(len(name) <= 52 for name in names)
    assert object_name(V3) == "flights-v3"


def test_objects_lead_back_to_their_release(template: ReleaseTemplate) -> None:
    release = Release(model="m" * 63, version=12, baseline=True)
    deployment = build_deployment(template, release, "models", ServingSpec(), 1)
    service = build_service(template, release, "models")
    assert release_of(deployment) == release_of(service) == release
    assert release_of({"metadata": {"name": "flights-v3"}}) is None
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items()
    assert service_endpoint(release, "models").http == f"{service['metadata']['name']}.models.svc:8000"


OWN_GPU = {"repository/delays/config.pbtxt": b"instance_group [{ kind: KIND_GPU }]"}
WANTED = {
    "a version for the CPU": (ServingSpec(), False, {}, 0),
    "one that was exported for a GPU": (ServingSpec(), True, {}, 1),
    "the same, set to the CPU": (ServingSpec(device="cpu"), True, {}, 0),
    "a spec that names a GPU": (ServingSpec(device="gpu"), False, {}, 1),
    "a spec that names two": (ServingSpec(gpus=2), True, {}, 2),
    "a team's own repository": (ServingSpec(), False, {"repository/delays/config.pbtxt": b""}, 0),
    "a team's own repository with a model on a GPU": (ServingSpec(), False, OWN_GPU, 1),
}


@pytest.mark.parametrize(("serving", "in_two", "extra", "gpus"), WANTED.values(), ids=WANTED)
def test_a_pod_asks_for_as_many_gpus_as_its_bundle_uses_and_tolerates_their_nodes_for_that_alone(
    template: ReleaseTemplate,
    tmp_path: Path,
    serving: ServingSpec,
    in_two: bool,
    extra: dict[str, bytes],
    gpus: int,
) -> None:
    bundle = bundles.publish(Store(str(tmp_path)), bias=0.0, in_two=in_two, extra=extra)
    assert gpus_wanted(bundle, serving) == gpus
    pod = build_deployment(template, V3, "models", serving, gpus)["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        for asked in container["resources"].values():
            assert asked.get("nvidia.com/gpu", 0) == gpus
    assert [each["key"] for each in pod["tolerations"]] == (["nvidia.com/gpu"] if gpus else [])


@pytest.mark.parametrize("serving", [ServingSpec(device="gpu"), ServingSpec(gpus=2)])
def test_a_spec_that_names_gpus_is_refused_by_a_cluster_whose_template_has_none(serving: ServingSpec) -> None:
    template = ReleaseTemplate.read(FOLDER / "base" / "release.yaml")
    with pytest.raises(BackendRefused, match=r"asks for no nvidia\.com/gpu; apply .*overlays/gpu"):
        build_deployment(template, V3, "models", serving, serving.gpus)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kind: Deployment\n", "it has Deployment, not one Deployment and one Service"),
        ("[", "while parsing"),
        (
            "kind: Service\n---\nkind: Deployment\nspec: {template: {spec: {containers: []}}}\n",
            "no containers",
        ),
        ("kind: Service\n---\nkind: Deployment\nspec: 3\n", "a key is missing"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "release.yaml").write_text(text)
    with pytest.raises(TemplateUnfit, match=reason):
        ReleaseTemplate.read(tmp_path / "release.yaml")


RANGE = ServingSpec(replicas=ReplicaRange(min=2, max=8), instances=3)
MEASURED = Capacity(in_flight=16, requests_per_s=1000.5)


def test_an_autoscaler_follows_the_metrics_of_the_release_s_service(template: ReleaseTemplate) -> None:
    made = build_autoscaler(template, V3, "models", RANGE, MEASURED, VERSIONS[0])
    spec, service = made["spec"], build_service(template, V3, "models")["metadata"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "flights-v3"}
    assert spec["behavior"] == template.autoscaler["spec"]["behavior"]
    assert made["metadata"] == service
    found = {each["object"]["metric"]["name"]: each["object"] for each in spec["metrics"]}
    assert found[IN_FLIGHT]["target"] == {"type": "AverageValue", "averageValue": "11200m"}
    assert found[PER_SECOND]["target"] == {"type": "AverageValue", "averageValue": "700350m"}
    for each in found.values():
        assert each["describedObject"] == {"apiVersion": "v1", "kind": "Service", "name": service["name"]}


def test_what_a_replica_may_have_without_a_measurement_follows_from_its_instances() -> None:
    assert targets(RANGE, None) == pytest.approx({IN_FLIGHT: 4.2})
    assert targets(ServingSpec(instances=3, gpus=2), None) == pytest.approx({IN_FLIGHT: 8.4})
    slow = Capacity(in_flight=1, requests_per_s=0.001)
    assert targets(RANGE, slow) == {PER_SECOND: 0.01, IN_FLIGHT: 1.0}


@pytest.mark.parametrize("name", ["base", "overlays/gpu"])
def test_the_replicas_of_a_range_are_not_set_by_the_template_either(name: str) -> None:
    template = ReleaseTemplate.read(FOLDER / name / "release.yaml")
    assert "replicas" not in build_deployment(template, V3, "models", RANGE, 0)["spec"]
    assert build_deployment(template, V3, "models", ServingSpec(), 0)["spec"]["replicas"] == 2
    assert build_deployment(template, V3, "models", ServingSpec(replicas=3), 0)["spec"]["replicas"] == 3


def test_a_template_without_an_autoscaler_scales_as_kubernetes_does(template: ReleaseTemplate) -> None:
    bare = replace(template, autoscaler={})
    made = build_autoscaler(bare, V3, "models", RANGE, MEASURED, VERSIONS[1])
    assert made["apiVersion"] == "autoscaling/v2beta2"
    assert "behavior" not in made["spec"]
    assert release_of(made) == V3


def test_a_release_whose_service_has_another_name_is_not_scaled(template: ReleaseTemplate) -> None:
    long = Release(model="m" * 63, version=1)
    with pytest.raises(BackendRefused, match=r"more than 52 characters.*set a number of replicas"):
        build_autoscaler(template, long, "models", RANGE, MEASURED, VERSIONS[0])


def _deployment(ready: int, progress: str, status: str = "True", observed: int = 1) -> dict[str, Any]:
    conditions = [{"type": "Progressing", "status": status, "reason": progress, "message": "too slow"}]
    return {
        "metadata": {"generation": 1},
        "status": {"observedGeneration": observed, "readyReplicas": ready, "conditions": conditions},
    }


def _pod(container: str) -> dict[str, Any]:
    statuses = [{"name": "triton", **yaml.safe_load(container)}]
    return {"metadata": {"labels": {RELEASE_LABEL: "flights-v3"}}, "status": {"containerStatuses": statuses}}


DONE, ON_THE_WAY = "NewReplicaSetAvailable", "ReplicaSetUpdated"
CRASHED = _pod("{state: {waiting: {reason: CrashLoopBackOff}}, lastState: {terminated: {exitCode: 1}}}")
WRONG = "lastState: {terminated: {exitCode: 0, message: 2 rows differ}}"
STATES = {
    "it is not looked at yet": (_deployment(0, ON_THE_WAY, observed=0), [], "starting", ""),
    "one of two replicas is ready for the first time": (_deployment(1, ON_THE_WAY), [], "starting", ""),
    "all were ready once": (_deployment(2, DONE), [], "ready", ""),
    "one is ready after all were": (_deployment(1, DONE), [], "ready", ""),
    "none is ready any more": (_deployment(0, DONE), [], "dead", "no replica is ready any more"),
    "it took too long": (_deployment(1, "ProgressDeadlineExceeded", "False"), [], "dead", "too slow"),
    "its process ends at once": (_deployment(0, ON_THE_WAY), [CRASHED], "dead", "triton: CrashLoopBackOff"),
    "its image cannot be pulled": (
        _deployment(0, ON_THE_WAY), [_pod("{state: {waiting: {reason: ErrImagePull, message: no such image}}}")],
        "dead", "triton: ErrImagePull: no such image",
    ),
    "its process is started again": (
        _deployment(0, ON_THE_WAY), [_pod("{state: {running: {}}, lastState: {terminated: {exitCode: 137}}}")],
        "dead", "triton exited with code 137",
    ),
    "it answered its golden rows wrongly": (
        _deployment(0, ON_THE_WAY), [_pod(f"{{state: {{running: {{}}}}, {WRONG}}}")],
        "dead", "triton exited with code 0: 2 rows differ",
    ),
    "the same, again and again": (
        _deployment(0, ON_THE_WAY), [_pod(f"{{state: {{waiting: {{reason: CrashLoopBackOff}}}}, {WRONG}}}")],
        "dead", "triton: CrashLoopBackOff: 2 rows differ",
    ),
    "it starts": (_deployment(0, ON_THE_WAY), [_pod("{state: {waiting: {reason: PodInitializing}}}")], "starting", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_a_release_follows_from_its_deployment_and_pods(case: str) -> None:
    deployment, pods, state, reason = STATES[case]
    assert deployment_state(deployment, pods) == (state, reason)


def test_pods_that_are_being_deleted_do_not_count() -> None:
    leaving = {**CRASHED, "metadata": {**CRASHED["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert pods_of([leaving, CRASHED], V3) == [CRASHED]


def test_a_restart_counts_once_its_pod_was_ready() -> None:
    seen: dict[str, Restarts] = {}

    def look(ready: bool, restarts: int) -> int:
        pod = _pod(f"{{ready: {str(ready).lower()}, restartCount: {restarts}}}")
        pod["metadata"]["uid"] = "a"
        count_restarts(seen, [pod])
        return sum(each.now - each.when_ready for each in seen.values())

    assert [look(False, 0), look(False, 3), look(True, 3), look(False, 4), look(True, 4)] == [0, 0, 0, 1, 1]


LIVE, NEW = Release(model="m", version=1), Release(model="m", version=2)
A = InputColumn(name="a", dtype="FP32", kind="float", null="NaN")
B = InputColumn(name="b", dtype="BYTES", kind="string", null='""')
SCORE = OutputTensor(name="score", dtype="FP32", dims=(1,))
SCHEMA = Schema(task="binary", inputs=(A,), outputs=(SCORE,))
LABEL = OutputTensor(name="label", dtype="INT64", dims=(1,))


def check(tmp_path: Path, new: Schema, *, share: bool = True) -> None:
    schemas = {LIVE: SCHEMA, NEW: new}
    CombinedFleet(FakeFleet(), External(Store(str(tmp_path))), schemas.__getitem__).check_fits(
        NEW, LIVE, share=share
    )


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (replace(SCHEMA, inputs=(A, B)), "it also asks for b"),
        (replace(SCHEMA, inputs=(B,)), "it also asks for b, it does not take a"),
        (replace(SCHEMA, inputs=(replace(B, name="a"),)), "it takes another type for a"),
        (replace(SCHEMA, outputs=(LABEL,)), "it answers differently in score"),
    ],
)
def test_a_version_whose_requests_or_answers_differ_does_not_share_clients(
    tmp_path: Path, new: Schema, reason: str
) -> None:
    with pytest.raises(RequestsDiffer, match=rf"m-v2 cannot share clients with m-v1: {reason}\."):
        check(tmp_path, new)
    check(tmp_path, new, share=False)  # all clients change at once


@pytest.mark.parametrize("new", [SCHEMA, replace(SCHEMA, outputs=(SCORE, LABEL))])
def test_a_version_that_takes_the_same_requests_shares_clients(tmp_path: Path, new: Schema) -> None:
    check(tmp_path, new)
