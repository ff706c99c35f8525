"""The fleet's autoscalers while rollouts run and after them, against a namespace in memory."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serin.cluster.kubernetes import fleet as module
from serin.cluster.kubernetes.autoscaler import FLOOR, VERSIONS
from serin.cluster.kubernetes.fleet import KubernetesFleet
from serin.cluster.kubernetes.release_objects import (
    MANAGED_BY,
    MANAGER,
    RELEASE_NAME,
    ReleaseTemplate,
    object_name,
)
from serin.errors import KubernetesGone, KubernetesRefused
from serin.rollout.decide.state import Phase, Rollout
from serin.spec.serving import ReplicaRange
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.unit.cluster.test_replica_ranges import V1, V2, at, loaded, scaler
from tests.unit.serving import bundles

SCALERS = "horizontalpodautoscalers"
TEMPLATE = Path(__file__).resolve().parents[3] / "deployments" / "kubernetes" / "base" / "release.yaml"


class FakeNamespace:
    """`refuses`: a resource whose changes fail, with the status."""

    name, autoscaling = "models", VERSIONS[0]

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.applied: list[str] = []
        self.refuses: dict[str, int] = {}
        self.gone = False

    def get(self, resource: str, name: str) -> dict[str, Any] | None:
        if self.gone:
            raise KubernetesGone(url="https://cluster", reason="no route")
        return deepcopy(self.objects.get((resource, name)))

    def list(self, resource: str, _: str) -> list[dict[str, Any]]:
        return [each for (kind, _), each in self.objects.items() if kind == resource]

    def apply(self, resource: str, wanted: dict[str, Any]) -> dict[str, Any]:
        self._check(resource)
        self.applied.append(resource)
        self.objects[resource, wanted["metadata"]["name"]] = wanted
        return wanted

    def merge(self, resource: str, name: str, change: dict[str, Any]) -> None:
        self._check(resource)
        found = self.objects[resource, name]
        found["spec"].update(change["spec"])
        found["metadata"].update(change["metadata"])

    def _check(self, resource: str) -> None:
        if resource in self.refuses:
            raise KubernetesRefused(action=f"PATCH {resource}", status=self.refuses[resource], reason="no")

    def has(self, release: Release, autoscaler: dict[str, Any] | None, *, replicas: int = 1) -> None:
        labels, name = {MANAGED_BY: MANAGER}, object_name(release)
        head = {"name": name, "labels": labels, "annotations": {RELEASE_NAME: release.name}}
        self.objects["deployments", name] = {
            "metadata": head, "spec": {"replicas": replicas}, "status": {"readyReplicas": replicas},
        }  # fmt: skip
        if autoscaler is not None:
            autoscaler["metadata"]["labels"] = labels
            self.objects[SCALERS, name] = autoscaler

    def floor(self, release: Release) -> tuple[int, str | None]:
        found = self.objects[SCALERS, object_name(release)]
        return found["spec"]["minReplicas"], found["metadata"]["annotations"].get(FLOOR)


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> FakeNamespace:
    monkeypatch.setattr(module, "_FRESH_S", 0.0)
    return FakeNamespace()


@pytest.fixture
def fleet(space: FakeNamespace) -> KubernetesFleet:
    return fleet_of(space)


def fleet_of(space: FakeNamespace, store: Any = None) -> KubernetesFleet:
    made = KubernetesFleet(space, ReleaseTemplate.read(TEMPLATE), store)  # type: ignore[arg-type]
    if store is None:
        made._wanted = lambda _: ReplicaRange(min=1, max=10)  # type: ignore[assignment]
    return made


def test_the_floors_of_a_rollout_follow_its_traffic_and_go_with_it(
    space: FakeNamespace, fleet: KubernetesFleet
) -> None:
    for release in (V1, V2):
        space.has(release, loaded(scaler(1, most=10), 4, per_second="7"), replicas=4)
    shifting = at(Phase.SHIFTING, 0)
    for _ in range(3):
        assert fleet.keep_floors([shifting]) == {}
    assert (space.floor(V1), space.floor(V2)) == ((8, "r1"), (4, "r1"))
    assert fleet.lacks(shifting) == ""
    assert fleet.lacks(at(Phase.SHIFTING, 1)) == "4 of 8 replicas are ready for the next step"
    space.objects.pop((SCALERS, V1.name))
    fleet.keep_floors([replace(shifting, phase=Phase.PROMOTED)])
    assert space.floor(V2) == (1, None)


def test_the_load_of_all_traffic_does_not_exceed_what_the_stable_release_may_have(
    space: FakeNamespace, fleet: KubernetesFleet
) -> None:
    for release in (V1, V2):
        space.has(release, loaded(scaler(1, most=10), 4, per_second="70"), replicas=4)
    fleet.keep_floors([at(Phase.SHIFTING, 0)])
    assert (space.floor(V1), space.floor(V2)) == ((10, "r1"), (5, "r1"))


def other(now: Rollout) -> Rollout:
    return replace(now, candidate=Release(model="other", version=1), stable=None, id="other")


def test_a_model_whose_floors_cannot_be_kept_does_not_harm_the_others(
    space: FakeNamespace, fleet: KubernetesFleet
) -> None:
    def wanted(release: Release) -> ReplicaRange:
        if release.model == "other":
            raise OSError("version 1 of other is not in the store")
        return ReplicaRange(min=1, max=10)

    fleet._wanted = wanted  # type: ignore[assignment]
    space.has(V2, scaler(5, "r1"))
    ended = at(Phase.PROMOTED, 2)
    problems = fleet.keep_floors([other(ended), ended])
    assert problems == {"other": "version 1 of other is not in the store"}
    assert space.floor(V2) == (1, None)


def test_a_cluster_that_does_not_answer_is_asked_once(space: FakeNamespace, fleet: KubernetesFleet) -> None:
    space.gone = True
    ended = at(Phase.PROMOTED, 2)
    assert list(fleet.keep_floors([ended, other(ended)])) == ["delays"]


def test_an_autoscaler_that_was_changed_in_between_is_looked_at_again(
    space: FakeNamespace, fleet: KubernetesFleet
) -> None:
    space.has(V2, scaler(5, "r1"))
    space.refuses[SCALERS] = 409
    ended = at(Phase.PROMOTED, 2)
    assert fleet.keep_floors([ended]) == {}
    space.refuses.clear()
    fleet.keep_floors([ended])
    assert space.floor(V2) == (1, None)


def test_an_autoscaler_that_is_missing_is_made_again(
    space: FakeNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has deleted it, while a rollout runs or long after it."""
    release, store = published(tmp_path)
    fleet, clock = fleet_of(space, store), SimpleNamespace(t=0.0, monotonic=lambda: clock.t)
    monkeypatch.setattr(module, "time", clock)
    space.has(release, None, replicas=3)
    ended = replace(at(Phase.PROMOTED, 2), candidate=release, stable=None)
    fleet.keep_floors([ended])
    assert space.floor(release) == (2, None)
    fleet.keep_floors([ended])
    del space.objects[SCALERS, release.name]
    fleet.keep_floors([ended])
    assert space.applied == [SCALERS], "while no rollout runs it is looked at from time to time"
    clock.t += 60.0
    fleet.keep_floors([ended])
    assert space.applied == [SCALERS, SCALERS]


def test_a_release_that_is_about_to_be_started_has_no_autoscaler_yet(
    space: FakeNamespace, fleet: KubernetesFleet
) -> None:
    assert fleet.keep_floors([at(Phase.LOADING, None)]) == {}
    assert space.objects == {}


def test_a_start_that_is_cut_off_leaves_no_release_without_its_autoscaler(
    space: FakeNamespace, tmp_path: Path
) -> None:
    release, store = published(tmp_path)
    fleet = fleet_of(space, store)
    space.refuses["deployments"] = 500
    with pytest.raises(KubernetesRefused):
        fleet.start(release)
    assert space.applied == [SCALERS, "services"]
    space.refuses.clear()
    fleet.start(release)
    assert space.applied[2:] == [SCALERS, "services", "deployments"]


def test_applying_an_autoscaler_again_keeps_a_raised_floor(space: FakeNamespace, tmp_path: Path) -> None:
    release, store = published(tmp_path)
    fleet = fleet_of(space, store)
    fleet.start(release)
    space.objects[SCALERS, release.name]["spec"]["minReplicas"] = 5
    fleet._scale(release)
    assert space.objects[SCALERS, release.name]["spec"]["minReplicas"] == 5


def published(folder: Path) -> tuple[Release, Store]:
    store = Store(str(folder))
    bundle = bundles.publish(store, bias=0.0, spec="serving: {replicas: {min: 2, max: 5}}\n")
    return Release(model=bundle.model, version=1), store


def test_only_a_range_of_replicas_is_waited_for(fleet: KubernetesFleet) -> None:
    fleet._wanted = lambda _: 3
    assert fleet.lacks(at(Phase.SHIFTING, 0)) == ""


def test_a_first_release_lacks_its_least_replicas(space: FakeNamespace, fleet: KubernetesFleet) -> None:
    fleet._wanted = lambda _: ReplicaRange(min=3, max=10)
    space.has(V2, scaler(3), replicas=1)
    first = replace(at(Phase.VERIFYING, None), stable=None)
    assert fleet.lacks(first) == "1 of 3 replicas are ready for the next step"
