"""The Kubernetes objects of one release, made from a template. Pure but for reading the template.

The template is a YAML file with one Deployment, one Service and at most one HorizontalPodAutoscaler. In each of its
strings {release}, {name}, {model} and {version} are replaced; names, namespace, labels and selectors are set here. What
else it says is kept: images, resources, tolerations, volumes.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from serin.errors import BackendRefused, NameInvalid, TemplateUnfit
from serin.serving.triton.backends import names_gpus
from serin.spec.serving import ReplicaRange, ServingSpec
from serin.store.artifacts import Endpoint, Release

Object = dict[str, Any]

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "serin"
RELEASE_LABEL: Final = "serin.dev/release"
MODEL_LABEL: Final = "serin.dev/model"
RELEASE_NAME: Final = "serin.dev/release-name"  # an annotation: a label cannot hold every name
SELECTOR: Final = f"{MANAGED_BY}={MANAGER},{RELEASE_LABEL}"
GPU: Final = "nvidia.com/gpu"
AUTOSCALER: Final = "HorizontalPodAutoscaler"
HTTP_PORT, GRPC_PORT, METRICS_PORT = 8000, 8001, 8002

_LONGEST_NAME: Final = 52  # a pod's name adds 17 characters to it, and a label's value has at most 63


def object_name(release: Release) -> str:
    """Returns the release's name, or a shorter one that no other release has."""
    if len(release.name) <= _LONGEST_NAME:
        return release.name
    digest = hashlib.sha256(release.name.encode()).hexdigest()[:10]
    return f"{release.name[: _LONGEST_NAME - 11].rstrip('-')}-{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTemplate:
    deployment: Object
    service: Object
    autoscaler: Object = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> ReleaseTemplate:
        """Raises TemplateUnfit for a file that has not exactly one Deployment with containers and one Service, and at
        most one HorizontalPodAutoscaler."""
        try:
            found = [item for item in yaml.safe_load_all(path.read_text(encoding="utf-8")) if item]
            kinds = sorted(str(item["kind"]) for item in found)
            if kinds not in (["Deployment", "Service"], ["Deployment", AUTOSCALER, "Service"]):
                raise TemplateUnfit(
                    path=str(path),
                    reason=f"it has {', '.join(kinds) or 'nothing'}, not one Deployment and one Service",
                )
            by_kind = {item["kind"]: item for item in found}
            if not by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]:
                raise TemplateUnfit(path=str(path), reason="its Deployment has no containers")
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise TemplateUnfit(path=str(path), reason=str(error)) from error
        except (KeyError, TypeError) as error:
            raise TemplateUnfit(
                path=str(path), reason=f"a key is missing or has the wrong type: {error}"
            ) from error
        return cls(
            deployment=by_kind["Deployment"],
            service=by_kind["Service"],
            autoscaler=by_kind.get(AUTOSCALER, {}),
        )


def build_deployment(
    template: ReleaseTemplate, release: Release, namespace: str, serving: ServingSpec, gpus: int
) -> Object:
    """Returns the Deployment. Where the template asks for GPUs, each pod asks for `gpus`; for none, it does not
    tolerate their nodes either. Replicas are left to the autoscaler where the spec has a range of them.

    Raises BackendRefused for a spec that names GPUs which the template does not have.
    """
    made = release_object(template.deployment, release, namespace)
    spec = made["spec"]
    if isinstance(serving.replicas, int):
        spec["replicas"] = serving.replicas
    elif isinstance(serving.replicas, ReplicaRange):
        spec.pop("replicas", None)
    spec["selector"] = {"matchLabels": {RELEASE_LABEL: object_name(release)}}
    pod = spec["template"]
    pod.setdefault("metadata", {}).setdefault("labels", {}).update(_labels(release))
    pod["metadata"].setdefault("annotations", {})[RELEASE_NAME] = release.name
    found = [resources for resources in _resources(pod["spec"]) if GPU in resources]
    if names_gpus(serving) and not found:
        raise BackendRefused(
            model=release.name,
            asked="serving.device: gpu" if serving.gpus == 1 else f"serving.gpus: {serving.gpus}",
            reason=f"the release template of this cluster asks for no {GPU}",
            instead="apply deployments/kubernetes/overlays/gpu, or set serving.device: cpu",
        )
    for resources in found:
        resources[GPU] = gpus
        if not gpus:
            del resources[GPU]
    if not gpus:
        tolerated = pod["spec"].get("tolerations", [])
        pod["spec"]["tolerations"] = [each for each in tolerated if each.get("key") != GPU]
    return made


def build_service(template: ReleaseTemplate, release: Release, namespace: str) -> Object:
    made = release_object(template.service, release, namespace)
    made["spec"]["selector"] = {RELEASE_LABEL: object_name(release)}
    return made


def service_endpoint(release: Release, namespace: str) -> Endpoint:
    """Returns the address of the Service inside the cluster."""
    host = f"{object_name(release)}.{namespace}.svc"
    return Endpoint(http=f"{host}:{HTTP_PORT}", grpc=f"{host}:{GRPC_PORT}")


def release_of(found: Mapping[str, Any]) -> Release | None:
    """Returns the release that an object belongs to; None for an object that is not Serin's."""
    metadata = found.get("metadata", {})
    if metadata.get("labels", {}).get(MANAGED_BY) != MANAGER:
        return None
    try:
        return Release.parse(metadata.get("annotations", {}).get(RELEASE_NAME, ""))
    except NameInvalid:
        return None


def release_object(part: Object, release: Release, namespace: str) -> Object:
    """Returns a part of the template with its placeholders replaced, and with the name and labels of the release."""
    made: Object = _filled(part, release)
    metadata = made.setdefault("metadata", {})
    metadata["name"], metadata["namespace"] = object_name(release), namespace
    metadata.setdefault("labels", {}).update(_labels(release))
    metadata.setdefault("annotations", {})[RELEASE_NAME] = release.name
    return made


def _labels(release: Release) -> dict[str, str]:
    return {MANAGED_BY: MANAGER, RELEASE_LABEL: object_name(release), MODEL_LABEL: release.model.rstrip("-")}


def _filled(part: Any, release: Release) -> Any:
    """Returns a copy with the placeholders replaced."""
    values = {
        "{release}": release.name,
        "{name}": object_name(release),
        "{model}": release.model,
        "{version}": str(release.version),
    }
    if isinstance(part, str):
        for placeholder, value in values.items():
            part = part.replace(placeholder, value)
        return part
    if isinstance(part, dict):
        return {key: _filled(value, release) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, release) for value in part]
    return copy.copy(part)


def _resources(pod: Mapping[str, Any]) -> Iterator[Object]:
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind, ()):
            resources = container.get("resources", {})
            yield from (resources[name] for name in ("limits", "requests") if name in resources)
