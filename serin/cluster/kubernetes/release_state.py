"""The state of a release, by its Deployment and its pods. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from serin.cluster.kubernetes.release_objects import RELEASE_LABEL, Object, object_name
from serin.rollout.decide.advance import ReleaseState
from serin.store.artifacts import Release

# A pod in one of these waits for somebody to fix it.
_STUCK: Final = frozenset(
    {
        "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ErrImagePull",
        "ImagePullBackOff", "InvalidImageName", "RunContainerError",
    }
)  # fmt: skip


def pods_of(pods: Sequence[Object], release: Release) -> list[Object]:
    """Returns the release's pods that are not being deleted."""
    wanted = object_name(release)
    return [
        pod
        for pod in pods
        if pod["metadata"].get("labels", {}).get(RELEASE_LABEL) == wanted
        and "deletionTimestamp" not in pod["metadata"]
    ]


def deployment_state(deployment: Object, pods: Sequence[Object]) -> tuple[ReleaseState, str]:
    """Returns the state and, for a dead release, the reason.

    A release becomes ready when all of its replicas were ready at once, which Kubernetes remembers; from then on one
    ready replica keeps it ready. It is dead when none is ready any more, when its pods cannot start, or when they took
    longer than spec.progressDeadlineSeconds.
    """
    status = deployment.get("status", {})
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return "starting", ""
    progress: Object = next(
        (each for each in status.get("conditions", ()) if each["type"] == "Progressing"), {}
    )
    if progress.get("reason") == "NewReplicaSetAvailable":
        if status.get("readyReplicas", 0) > 0:
            return "ready", ""
        return "dead", _why(pods) or "no replica is ready any more"
    if progress.get("status") == "False":
        return "dead", _why(pods) or progress.get("message", "its pods did not become ready in time")
    reason = _why(pods)
    return ("dead", reason) if reason else ("starting", "")


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often the containers of a pod were restarted: until it was first seen ready, and until now."""

    when_ready: int
    now: int


def count_restarts(seen: dict[str, Restarts], pods: Sequence[Object]) -> None:
    """Notes the restarts of pods that are ready, or were, in `seen`, by uid."""
    for pod in pods:
        containers, uid = pod.get("status", {}).get("containerStatuses", ()), pod["metadata"]["uid"]
        count = sum(each["restartCount"] for each in containers)
        before = seen.get(uid)
        if before is not None:
            seen[uid] = Restarts(before.when_ready, max(count, before.now))
        elif containers and all(each["ready"] for each in containers):
            seen[uid] = Restarts(count, count)


def _why(pods: Sequence[Object]) -> str:
    """Returns why a pod cannot start; empty when none says so."""
    for pod in pods:
        for container in _containers(pod):
            waiting = container.get("state", {}).get("waiting", {})
            ended = container.get("lastState", {}).get("terminated") or container.get("state", {}).get(
                "terminated"
            )
            said = (ended or {}).get("message", "").strip()
            if waiting.get("reason") in _STUCK:
                why = said or waiting.get("message", "")
                return f"{container['name']}: {waiting['reason']}: {why}".rstrip(": ")
            if ended and (ended.get("exitCode") or said):
                return f"{container['name']} exited with code {ended['exitCode']}: {said}".rstrip(": ")
    return ""


def _containers(pod: Object) -> Iterator[Object]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses", ())
    yield from status.get("containerStatuses", ())
