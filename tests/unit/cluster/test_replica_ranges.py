"""A range of replicas: taken on Kubernetes, refused by name everywhere else; and what an autoscaler is given."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from serin.cluster.kubernetes.autoscaler import (
    FLOOR,
    floor_change,
    load_of,
    replicas_for,
    rollout_floors,
    share_of,
)
from serin.cluster.version_settings import check_replicas
from serin.errors import RolloutRefused, SpecError
from serin.formats.cluster.host_report import AgentReport, agent_key
from serin.formats.cluster.replicas import place_without_autoscaler
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout
from serin.serving.triton.repository import Capacity, measured_capacity, share_tuned, tuned_file
from serin.serving.tuning.report import write_report
from serin.serving.tuning.trials import Tuning
from serin.spec.elsewhere import load_elsewhere
from serin.spec.load import load_spec
from serin.spec.serving import ReplicaRange, ServingSpec
from serin.store.artifacts import Bundle, Release
from serin.store.open import open_objects
from serin.store.store import Store
from tests.unit.serving import bundles
from tests.unit.serving.test_tune import tuning

SPEC = "serving: {replicas: {min: 2, max: 5}}\n"
MODEL = {"name": "delays", "model": {"kind": "onnx", "onnx": "m.onnx", "golden": "g.npz", "task": "binary"}}


@pytest.mark.parametrize("shared", [True, False])
def test_a_rollout_is_refused_where_replicas_are_fixed(tmp_path: Path, shared: bool) -> None:
    store = Store(str(tmp_path))
    versions = [bundles.publish(store, bias=0.0, spec=spec) for spec in (SPEC, "serving: {replicas: 2}\n")]
    check = check_replicas(store, shared=shared)
    place = "hosts with agents run a fixed number" if shared else "one machine runs one replica"
    with pytest.raises(RolloutRefused, match=rf"serving.replicas: \{{min: 2, max: 5\}}: {place}.*Kubernetes"):
        check(Release(model=versions[0].model, version=1))
    check(Release(model=versions[1].model, version=2))


def report(host: str, peer: str | None) -> AgentReport:
    return AgentReport(host=host, beat=1, t=0.0, address=host, peer=peer, desired_seq=0, evidence_seq=0)


def test_the_place_of_a_store_is_known_by_the_hosts_that_report_to_it(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        place_without_autoscaler(Store(str(tmp_path / "store")))
        == "one machine runs one replica of a release"
    )
    store, objects = Store(bucket, cache=tmp_path / "cache"), open_objects(bucket)
    assert place_without_autoscaler(store) is None
    objects.put(agent_key("gateway"), report("gateway", None).dump())
    assert place_without_autoscaler(store) is None, "a gateway of Kubernetes runs no releases"
    objects.put(agent_key("b"), report("b", "b:8443").dump())
    assert place_without_autoscaler(store) == "hosts with agents run a fixed number of replicas"
    monkeypatch.setattr("serin.formats.cluster.replicas._SILENT_S", -1.0)
    assert place_without_autoscaler(store) is None, "a host that was lost runs nothing"


def test_a_server_elsewhere_has_no_replicas_here(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"serving\.replicas.*the server decides that itself"):
        load_elsewhere("delays", {"name": "delays", "serving": {"replicas": {"max": 3}}})


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        ({"min": 3, "max": 2}, "min=3 is more than max=2"),
        ({"min": 0, "max": 2}, "min"),
        ({"min": 1}, "max"),
        ({"max": 3, "step": 1}, "step"),
        (0, "greater than or equal to 1"),
    ],
)
def test_a_range_that_is_none_is_refused(replicas: Any, says: str) -> None:
    with pytest.raises(SpecError, match=rf"serving\.replicas.*{says}") as refused:
        load_spec({**MODEL, "serving": {"replicas": replicas}})
    assert len(refused.value.fields["problems"]) == 1, "one mistake is one problem"


def test_a_range_survives_being_stored_with_a_version() -> None:
    spec = load_spec({**MODEL, "serving": {"replicas": {"max": 3}}})
    assert spec.serving.replicas == ReplicaRange(min=1, max=3)
    stored = yaml.safe_load(yaml.safe_dump(spec.serving.model_dump(mode="json")))
    assert ServingSpec.model_validate(stored).replicas == spec.serving.replicas


def test_the_capacity_is_the_least_that_any_machine_has_measured(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(bucket, cache=tmp_path / "cache")
    bundle = bundles.publish(store, bias=0.0)
    assert measured_capacity(store, bundle) is None
    found = tuning(bundle)
    best = found.chosen.best(found.limit_ms)
    assert best is not None
    here = Capacity(in_flight=best.clients, requests_per_s=found.steady_requests_per_s)
    text = tuned_file(write_and_share(store, bundle, found)).read_text()
    assert measured_capacity(store, bundle) == here
    monkeypatch.setattr("serin.serving.triton.repository.core_count", lambda: 64)
    other = f"in_flight: 2, requests_per_s: {9 * here.requests_per_s}"
    tuned_file(bundle).write_text(re.sub(r"in_flight: .*(?=})", other, text))
    share_tuned(store, bundle)
    least = Capacity(in_flight=2, requests_per_s=here.requests_per_s)
    assert measured_capacity(store, bundle) == least
    store.shared_files().put(f"tuned/{bundle.model}/8-cores.yaml", b"format: [")
    assert measured_capacity(store, bundle) == least


def write_and_share(store: Store, bundle: Bundle, found: Tuning) -> Bundle:
    write_report(found)
    share_tuned(store, bundle)
    return bundle


def _metric(read: dict[str, str]) -> dict[str, Any]:
    return {"type": "Object", "object": {"target": {"type": "AverageValue", "averageValue": "7", **read}}}


def scaler(least: int, note: str | None = None, most: int = 8) -> dict[str, Any]:
    notes = {} if note is None else {FLOOR: note}
    return {
        "metadata": {"resourceVersion": "7", "annotations": notes},
        "spec": {"minReplicas": least, "maxReplicas": most, "metrics": [_metric({"value": "0"})]},
    }


CHANGES = {
    "no rollout": (scaler(2), None, 2, None),
    "a rollout begins": (scaler(2), "r1", 5, (5, "r1")),
    "a rollout begins with what the spec has anyway": (scaler(2), "r1", 2, (2, "r1")),
    "it was raised already, also by an earlier controller": (scaler(5, "r1"), "r1", 5, None),
    "more is needed": (scaler(5, "r1"), "r1", 6, (6, "r1")),
    "less would do, but the rollout runs": (scaler(5, "r1"), "r1", 3, None),
    "more than the most is not asked for": (scaler(2), "r1", 20, (8, "r1")),
    "the rollout is over": (scaler(5, "r1"), None, 2, (2, None)),
    "another rollout begins before it was restored": (scaler(5, "r1"), "r2", 3, (3, "r2")),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_floor_follows_from_the_rollout_and_the_object_alone(case: str) -> None:
    found, rollout, wanted, then = CHANGES[case]
    change = floor_change(found, rollout, wanted)
    if then is None:
        assert change is None
        return
    least, note = then
    assert change == {
        "metadata": {"resourceVersion": "7", "annotations": {FLOOR: note}},
        "spec": {"minReplicas": least, "metrics": [_metric({})]},
    }


def test_a_share_of_the_traffic_needs_that_share_of_the_replicas() -> None:
    assert [share_of(8, percent) for percent in (0, 1, 5, 12.5, 13, 50, 100)] == [1, 1, 1, 1, 2, 4, 8]


def at(
    phase: Phase, step: int | None, *, steps: tuple[float, ...] = (5.0, 50.0, 100.0), baseline: bool = False
) -> Rollout:
    return Rollout(
        id="r1",
        candidate=V2,
        stable=V1,
        previous=None,
        plan=Plan(steps=steps, baseline=baseline),
        phase=phase,
        step=step,
        began=0.0,
        since=0.0,
        evidence_from=0.0,
    )


V1, V2 = (Release(model="delays", version=version) for version in (1, 2))
FLOORS = {
    "it loads: the first step is next": (at(Phase.LOADING, None), {V1: 6, V2: 1}),
    "the first step: half of the traffic is next": (at(Phase.SHIFTING, 0), {V1: 6, V2: 3}),
    "half of the traffic: all of it is next": (at(Phase.SHIFTING, 1), {V1: 6, V2: 6}),
    "the bake: all of it can come back": (at(Phase.BAKING, 2), {V1: 6, V2: 6}),
    "it is going back": (at(Phase.ABORTING, 1), {V1: 6}),
    "it is over": (at(Phase.PROMOTED, 2), {}),
    "with a baseline": (at(Phase.SHIFTING, 0, baseline=True), {V1: 6, V2: 3, replace(V1, baseline=True): 3}),
}


@pytest.mark.parametrize("case", FLOORS)
def test_a_rollout_needs_replicas_for_what_may_come_next(case: str) -> None:
    now, floors = FLOORS[case]
    assert rollout_floors(now, {V1: 6, V2: 1}) == floors


def test_the_stable_release_keeps_what_the_candidate_has_needed() -> None:
    assert rollout_floors(at(Phase.BAKING, 2), {V1: 4, V2: 7}) == {V1: 7, V2: 7}


def test_the_stable_release_has_replicas_for_all_traffic() -> None:
    """At half of the traffic both are busy: if the candidate dies, the stable release gets twice its load."""
    scalers = [loaded(scaler(1), 4, per_second="7"), loaded(scaler(1), 4, per_second="6800m")]
    load = replicas_for(sum(map(load_of, scalers)))
    assert load == 8
    assert rollout_floors(at(Phase.SHIFTING, 1), {V1: 4, V2: 4}, load) == {V1: 8, V2: 8}
    raised = [loaded(scaler(8), 8, per_second="3500m"), loaded(scaler(8), 8, per_second="3400m")]
    assert replicas_for(sum(map(load_of, raised))) == load, "a floor does not raise itself"


def loaded(found: dict[str, Any], replicas: int, **metrics: str) -> dict[str, Any]:
    """An autoscaler that has read its metrics, of which 7 per replica are aimed at."""
    spec = [_metric({}) for _ in metrics]
    for name, each in zip(metrics, spec, strict=True):
        each["object"]["metric"] = {"name": name}
    read = [
        {"type": "Object", "object": {"metric": {"name": name}, "current": {"averageValue": value}}}
        for name, value in metrics.items()
    ]
    status = {"currentReplicas": replicas, "currentMetrics": read}
    return {**found, "spec": {**found["spec"], "metrics": spec}, "status": status}


@pytest.mark.parametrize(
    ("metrics", "load"),
    [
        ({"a": "7"}, 3.0),
        ({"a": "3500m", "b": "14"}, 6.0),
        ({"a": "7k"}, 3000.0),
        ({"a": "0"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_load_is_what_the_autoscaler_has_read(metrics: dict[str, str], load: float) -> None:
    assert load_of(loaded(scaler(1), 3, **metrics)) == pytest.approx(load)


def test_an_autoscaler_that_has_not_looked_yet_knows_no_load() -> None:
    found = loaded(scaler(1), 3, a="7")
    assert load_of({**found, "status": {"currentReplicas": 3, "currentMetrics": None}}) == 0.0
    assert load_of({key: value for key, value in found.items() if key != "status"}) == 0.0
    assert [replicas_for(load) for load in (0.0, 0.4, 1.0001, 4.4, 4.5, 8.0)] == [0, 1, 1, 4, 5, 8]
