"""Releases as Kubernetes Deployments: the fleet port of the rollout controller.

A release is a Deployment and a headless Service in one namespace, with a HorizontalPodAutoscaler where its spec has a
range of replicas. Serin touches only objects with its label.
Nothing is kept in this process that another controller could not read from the cluster.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from serin.cluster.kubernetes.autoscaler import (
    VERSIONS,
    build_autoscaler,
    floor_change,
    load_of,
    replicas_for,
    rollout_floors,
)
from serin.cluster.kubernetes.release_objects import (
    MANAGED_BY,
    MANAGER,
    RELEASE_LABEL,
    SELECTOR,
    Object,
    ReleaseTemplate,
    build_deployment,
    build_service,
    object_name,
    release_of,
    service_endpoint,
)
from serin.cluster.kubernetes.release_state import Restarts, count_restarts, deployment_state, pods_of
from serin.errors import (
    ExtraMissing,
    KubernetesGone,
    KubernetesRefused,
    ObjectNotOurs,
    ReleaseNotReady,
    TemplateUnfit,
)
from serin.formats.schema import read_schema
from serin.machine import environment
from serin.rollout.decide.advance import ReleaseState
from serin.rollout.decide.state import Rollout
from serin.rollout.run.verification import FOREIGN
from serin.serving.triton.probe import RowTimes, answers
from serin.serving.triton.repository import gpus_wanted, measured_capacity, serving_settings, wanted_replicas
from serin.serving.triton.verify import verify_release
from serin.spec.serving import ReplicaRange
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store

try:
    import urllib3.exceptions
    from kubernetes import client, config
except ModuleNotFoundError as error:
    raise ExtraMissing(package="kubernetes", extra="kubernetes") from error

Resource = Literal["deployments", "services", "pods", "horizontalpodautoscalers"]

FIELD_MANAGER: Final = "serin-controller"
NOT_FOUND, CONFLICT = 404, 409

_AUTOSCALERS: Final = "horizontalpodautoscalers"
_GROUP: Final[Mapping[Resource, str]] = {
    "deployments": "/apis/apps/v1",
    "services": "/api/v1",
    "pods": "/api/v1",
}
_PARTS: Final[Sequence[Resource]] = ("horizontalpodautoscalers", "deployments", "services")
_TIMEOUT_S: Final = 10.0
_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"


class Namespace:
    """Objects of one namespace."""

    def __init__(self, name: str, *, settings: client.Configuration | None = None) -> None:
        """`settings`: of the cluster; None: the pod's own service account, or what KUBECONFIG names."""
        self.name = name
        if settings is None:
            settings = client.Configuration()
            try:
                config.load_config(client_configuration=settings)
            except config.ConfigException as error:
                raise KubernetesGone(
                    url="(none)", reason=f"no cluster is configured here: {error}"
                ) from error
        self._settings = settings
        self._client = client.ApiClient(settings)

    @functools.cached_property
    def autoscaling(self) -> str:
        """The version of autoscalers that the API server offers, the best that Serin can write."""
        found = self._call("GET", "/apis/autoscaling").get("versions", [])
        offered = [str(each["groupVersion"]) for each in found]
        for version in VERSIONS:
            if version in offered:
                return version
        raise KubernetesRefused(
            action="GET /apis/autoscaling",
            status=NOT_FOUND,
            reason=f"it offers {', '.join(offered) or 'nothing'}, not {' or '.join(VERSIONS)}",
        )

    def get(self, resource: Resource, name: str) -> Object | None:
        try:
            return self._call("GET", self._path(resource, name))
        except KubernetesRefused as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def list(self, resource: Resource, selector: str) -> list[Object]:
        items = self._call("GET", self._path(resource), labelSelector=selector).get("items", [])
        return list(items)

    def apply(self, resource: Resource, wanted: Object) -> Object:
        """Creates the object, or changes the fields that Serin sets. Repeating it changes nothing."""
        return self._call(
            "PATCH",
            self._path(resource, wanted["metadata"]["name"]),
            body=wanted,
            kind=_APPLY,
            fieldManager=FIELD_MANAGER,
            force="true",
        )

    def merge(self, resource: Resource, name: str, change: Object) -> Object:
        """Changes some fields. With metadata.resourceVersion in `change` it raises KubernetesRefused with status 409
        when somebody changed the object since it was read."""
        path = self._path(resource, name)
        return self._call("PATCH", path, body=change, kind=_MERGE, fieldManager=FIELD_MANAGER)

    def delete(self, resource: Resource, name: str, *, uid: str) -> None:
        """Deletes this very object with all that depends on it; one that is gone or was replaced is left alone."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            # On an autoscaler nothing depends: it is gone at once, and a new one can have its name.
            "propagationPolicy": "Background" if resource == _AUTOSCALERS else "Foreground",
            "preconditions": {"uid": uid},
        }
        try:
            self._call("DELETE", self._path(resource, name), body=body)
        except KubernetesRefused as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                raise

    def _path(self, resource: Resource, name: str = "") -> str:
        group = f"/apis/{self.autoscaling}" if resource == _AUTOSCALERS else _GROUP[resource]
        return f"{group}/namespaces/{self.name}/{resource}" + (f"/{name}" if name else "")

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        kind: str = "application/json",
        **query: str,
    ) -> Object:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = kind
        call = self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._client.call_api(*call, _request_timeout=_TIMEOUT_S)
            content = answer.read()
        except (OSError, urllib3.exceptions.HTTPError, client.ApiException) as error:
            raise KubernetesGone(url=self._settings.host, reason=str(error)) from error
        if not 200 <= answer.status < 300:
            raise KubernetesRefused(
                action=f"{method} {path}", status=answer.status, reason=_message(content, answer.status)
            )
        found: Object = json.loads(content)
        return found


def _message(content: bytes, status: int) -> str:
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


logger = logging.getLogger(__name__)


_RESTARTED: Final = "serin.dev/restarted"
_FRESH_S: Final = 0.4  # within one tick of the controller the cluster is read once
_GONE_S: Final = 90.0  # for pods of a release that starts again right after it was stopped: see release.yaml
_LOOK_AGAIN_S: Final = 60.0  # how often autoscalers are looked at while no rollout runs
_LOOK_S: Final = 0.2


class KubernetesFleet:
    def __init__(
        self,
        namespace: Namespace,
        template: ReleaseTemplate,
        store: Store,
        *,
        reach: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint,
    ) -> None:
        """`reach`: returns the address at which this process reaches a Service. Inside the cluster that is its own."""
        self._namespace, self._template, self._store, self._reach = namespace, template, store, reach
        self._row_times = RowTimes()
        self._read_at, self._deployments, self._pods = float("-inf"), dict[str, Object](), list[Object]()
        # By pod, since it was first seen ready. It may be lost: it only tells a restart from a pod that is gone.
        self._restarts: dict[Release, dict[str, Restarts]] = {}
        # By model: the ended rollout whose floors are gone, and when that is looked at again. It may be lost, too.
        self._restored: dict[str, tuple[str, float]] = {}
        self._scalers: dict[Release, Object | None] = {}  # as they were read in this tick
        self._bundle = functools.cache(lambda release: store.bundle(release.model, release.label))
        self._wanted = functools.cache(lambda release: wanted_replicas(self._bundle(release)))

    def start(self, release: Release) -> None:
        """Applies the objects of the release. One that is dead gets new pods; any other is left as it is."""
        bundle = self._bundle(release)
        serving = serving_settings(bundle)
        gpus = gpus_wanted(bundle, serving)
        deployment = build_deployment(self._template, release, self._namespace.name, serving, gpus)
        existing = self._ours("deployments", release)
        if existing and _terminating(existing):
            self._wait_until_gone(release)
            existing = None
        if isinstance(serving.replicas, ReplicaRange):
            self._scale(release)  # first: a release whose start is cut off here is started again
        if existing and self.state(release) == "dead":
            self._restart(release, existing)
        else:
            self._keep_restart(deployment, existing)
            self._ours("services", release)
            self._namespace.apply("services", build_service(self._template, release, self._namespace.name))
            self._namespace.apply("deployments", deployment)
        self._row_times.forget(release)
        self._read_at = float("-inf")

    def state(self, release: Release) -> ReleaseState:
        """Returns the state by its Deployment and pods, and when they are ready, by whether it scores a row."""
        self._look()
        found = self._deployments.get(object_name(release))
        if found is None:
            return "absent"
        state, reason = deployment_state(found, pods_of(self._pods, release))
        if state != "ready":
            if reason:
                logger.warning("%s: %s", release.name, reason)
            return state
        bundle, began = self._bundle(release), time.monotonic()
        patience_s = self._row_times.patience_s(release, serving_settings(bundle).request_timeout)
        endpoint = self._reach(service_endpoint(release, self._namespace.name))
        if answers(endpoint.http, release, read_schema(Path(bundle.path)), timeout_s=patience_s):
            self._row_times.note(release, time.monotonic() - began)
            return "ready"
        return "dead" if self._row_times.known(release) else "starting"

    def instance(self, release: Release) -> int | None:
        """Returns a number made of its Deployment and how often containers of its pods were restarted. A pod that is
        added, removed, or restarted before it was ever ready, does not change it: it had no requests to fail."""
        self._look()
        deployment, pods = self._deployments.get(object_name(release)), pods_of(self._pods, release)
        if deployment is None or not pods:
            return None
        seen = self._restarts.setdefault(release, {})
        count_restarts(seen, pods)
        restarts = sum(each.now - each.when_ready for each in seen.values())
        marks = deployment["spec"]["template"]["metadata"].get("annotations", {})
        parts = (deployment["metadata"]["uid"], marks.get(_RESTARTED, ""), str(restarts))
        return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:6], "big")

    def endpoint(self, release: Release) -> Endpoint:
        self._look()
        if object_name(release) not in self._deployments:
            place = f"kubectl --namespace {self._namespace.name} get deployments"
            raise ReleaseNotReady(release=release.name, reason="it was not started", log=place)
        return service_endpoint(release, self._namespace.name)

    def verify(self, release: Release) -> None:
        """Checks the golden rows through the release's Service."""
        verify_release(release, self._reach(self.endpoint(release)), self._bundle(release))

    def stop(self, release: Release) -> None:
        """Deletes the objects of the release. Its pods finish requests in flight within their grace period."""
        for resource in _PARTS:
            found = self._ours(resource, release)
            if found:
                self._namespace.delete(resource, object_name(release), uid=found["metadata"]["uid"])
        self._row_times.forget(release)
        self._read_at = float("-inf")

    def running(self) -> Sequence[Release]:
        """Returns every release with a Deployment that is not being deleted."""
        self._look()
        return sorted(release for found in self._deployments.values() if (release := release_of(found)))

    def keep_floors(self, rollouts: Sequence[Rollout]) -> dict[str, str]:
        """Raises the least replicas of autoscaled releases while a rollout runs, and restores them after it. All of it
        follows from the rollouts and the cluster: repeating it changes nothing. Returns the problems, by model."""
        problems: dict[str, str] = {}
        for now in rollouts:
            try:
                self._keep_floors_of(now)
            except FOREIGN as error:
                problems[now.model] = str(error)
                if isinstance(error, KubernetesGone):
                    break  # for every model
        return problems

    def _keep_floors_of(self, now: Rollout) -> None:
        ended, again_at = self._restored.get(now.model, ("", 0.0))
        if ended == now.id and time.monotonic() < again_at:
            return
        self._look()
        floors, kept = self._floors(now), True
        for release in now.wanted:
            if (limits := self._range(release)) is not None:
                noted = now.id if release in floors else None
                least = max(floors.get(release, 0), limits.min)
                kept = self._keep_floor(release, noted, least) and kept
        if now.phase.final and kept:
            self._restored[now.model] = now.id, time.monotonic() + _LOOK_AGAIN_S

    def lacks(self, now: Rollout) -> str:
        """Says how many replicas of the candidate are missing that its next step needs; empty: none."""
        limits = self._range(now.candidate)
        if limits is None:
            return ""
        self._look()
        wanted = min(max(self._floors(now).get(now.candidate, 0), limits.min), limits.max)
        found = self._deployments.get(object_name(now.candidate), {})
        ready = int(found.get("status", {}).get("readyReplicas", 0))
        return f"{ready} of {wanted} replicas are ready for the next step" if ready < wanted else ""

    def _floors(self, now: Rollout) -> dict[Release, int]:
        """Returns the least replicas of a rollout's releases; of a rollout that has ended, none."""
        if now.phase.final or now.stable is None:
            return {}
        load, limits = 0, self._range(now.stable)
        if limits is not None:
            scalers = [self._scaler(release) for release in now.wanted if self._range(release) is not None]
            load = min(replicas_for(sum(load_of(found) for found in scalers if found)), limits.max)
        return rollout_floors(now, {release: self._replicas(release) for release in now.wanted}, load)

    def _range(self, release: Release) -> ReplicaRange | None:
        wanted = self._wanted(release)
        return wanted if isinstance(wanted, ReplicaRange) else None

    def _scaler(self, release: Release) -> Object | None:
        """Returns the autoscaler as it was read in this tick. Threads that start releases discard what was read."""
        missing: Object = {}
        found = self._scalers.get(release, missing)
        if found is missing:
            found = self._scalers[release] = self._ours(_AUTOSCALERS, release)
        return found

    def _keep_floor(self, release: Release, rollout: str | None, wanted: int) -> bool:
        """Returns whether it was so already. An autoscaler that somebody has deleted is made again."""
        found = self._scaler(release)
        if found is None:
            if object_name(release) not in self._deployments:
                return True  # both are made when it is started
            self._scale(release)
            return False
        change = floor_change(found, rollout, wanted)
        if change is None:
            return True
        self._scalers.pop(release, None)
        try:
            self._namespace.merge(_AUTOSCALERS, object_name(release), change)
        except KubernetesRefused as error:
            if error.status != CONFLICT:
                raise
            logger.info("the autoscaler of %s changed since it was read; it is looked at again", release.name)
        return False

    def _replicas(self, release: Release) -> int:
        found = self._deployments.get(object_name(release))
        return int(found["spec"].get("replicas", 1)) if found else 1

    def _look(self) -> None:
        if time.monotonic() - self._read_at < _FRESH_S:
            return
        found = self._namespace.list("deployments", SELECTOR)
        self._pods = self._namespace.list("pods", SELECTOR)
        self._deployments = {each["metadata"]["name"]: each for each in found if not _terminating(each)}
        self._scalers.clear()
        self._read_at = time.monotonic()

    def _ours(self, resource: Resource, release: Release) -> Object | None:
        """Returns the object of a release; raises ObjectNotOurs for one that somebody else made under its name."""
        found = self._namespace.get(resource, object_name(release))
        if found is not None and found["metadata"].get("labels", {}).get(MANAGED_BY) != MANAGER:
            raise ObjectNotOurs(
                kind=resource.removesuffix("s"),
                name=object_name(release),
                namespace=self._namespace.name,
                label=f"{MANAGED_BY}={MANAGER}",
            )
        return found

    def _scale(self, release: Release) -> None:
        """Applies the autoscaler. A floor that a rollout has raised stays."""
        bundle = self._bundle(release)
        serving, capacity = serving_settings(bundle), measured_capacity(self._store, bundle)
        version = self._namespace.autoscaling
        wanted = build_autoscaler(self._template, release, self._namespace.name, serving, capacity, version)
        existing = self._ours(_AUTOSCALERS, release)
        if existing:
            wanted["spec"]["minReplicas"] = existing["spec"].get("minReplicas", 1)
        self._namespace.apply(_AUTOSCALERS, wanted)
        self._scalers.pop(release, None)

    def _restart(self, release: Release, existing: Object) -> None:
        """Replaces the pods of a dead release, once: of two controllers that saw it dead one is too late."""
        metadata = existing["metadata"]
        marks = {_RESTARTED: metadata["resourceVersion"]}
        change = {
            "metadata": {"resourceVersion": metadata["resourceVersion"]},
            "spec": {"template": {"metadata": {"annotations": marks}}},
        }
        try:
            self._namespace.merge("deployments", object_name(release), change)
        except KubernetesRefused as error:
            if error.status != CONFLICT:
                raise
            logger.info("%s changed since it was read; it is looked at again", release.name)

    @staticmethod
    def _keep_restart(deployment: Object, existing: Object | None) -> None:
        """Keeps the mark of an earlier restart, so that applying the objects again does not replace the pods."""
        kept = existing["spec"]["template"]["metadata"].get("annotations", {}) if existing else {}
        if _RESTARTED in kept:
            deployment["spec"]["template"]["metadata"]["annotations"][_RESTARTED] = kept[_RESTARTED]

    def _wait_until_gone(self, release: Release) -> None:
        end = time.monotonic() + _GONE_S
        while self._namespace.get("deployments", object_name(release)) is not None:
            if time.monotonic() > end:
                reason = f"its earlier pods were not gone after {_GONE_S:.0f} s"
                place = f"kubectl --namespace {self._namespace.name} get pods -l {RELEASE_LABEL}={object_name(release)}"
                raise ReleaseNotReady(release=release.name, reason=reason, log=place)
            time.sleep(_LOOK_S)


def _terminating(found: Object) -> bool:
    return "deletionTimestamp" in found["metadata"]


def build_fleet(store: Store) -> KubernetesFleet:
    """Returns the fleet that the environment describes: the template, the namespace and the cluster."""
    path = environment.path("SERIN_RELEASE_TEMPLATE")
    if path is None:
        raise TemplateUnfit(path="SERIN_RELEASE_TEMPLATE", reason="it is not set")
    return KubernetesFleet(Namespace(environment.release_namespace()), ReleaseTemplate.read(path), store)
