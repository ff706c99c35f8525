"""deployments/kubernetes as files: kustomize is not needed here (make cluster-test builds and applies the overlays)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from serin.spec.serving import ServingSpec
from serin.stack.kubernetes.release_objects import ReleaseTemplate, build_deployment, build_service
from serin.store.artifacts import Release

FOLDER = Path(__file__).resolve().parents[2] / "deployments" / "kubernetes"
SCHEMA = "1.36"
RELEASE = Release(model="flights", version=3)
TEMPLATES = [FOLDER / "base" / "release.yaml", FOLDER / "overlays" / "gpu" / "release.yaml"]
# Prefect's worker refuses a template without them, at a place where Kubernetes does not know them and drops them.
WANTED_BY_THE_WORKER = ("completions", "parallelism")
POOLS = [
    FOLDER / "base" / "cpu-pool.json",
    FOLDER / "base" / "gpu-pool.json",
    FOLDER / "overlays" / "gpu" / "gpu-pool.json",
]


def _objects() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(FOLDER.rglob("*.yaml")):
        if path.name not in ("kustomization.yaml", "release.yaml"):
            for document in yaml.safe_load_all(path.read_text()):
                yield (
                    f"{path.relative_to(FOLDER)}:{document['kind']}/{document['metadata']['name']}",
                    document,
                )


def _releases() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in TEMPLATES:
        template = ReleaseTemplate.read(path)
        where = str(path.relative_to(FOLDER))
        yield f"{where}:deployment", build_deployment(template, RELEASE, "serin-releases", ServingSpec())
        yield f"{where}:service", build_service(template, RELEASE, "serin-releases")


def _jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in POOLS:
        template = json.loads(path.read_text())
        defaults = {name: each.get("default") for name, each in template["variables"]["properties"].items()}
        defaults.update(name="stage", labels={}, annotations={}, env=[], command=["prefect"])
        job = _filled(template["job_configuration"]["job_manifest"], defaults)
        for name in WANTED_BY_THE_WORKER:
            assert job["spec"]["template"]["spec"].pop(name) == 1
        yield str(path.relative_to(FOLDER)), job


def _filled(part: Any, values: dict[str, Any]) -> Any:
    """Replaces Prefect's placeholders: a string that is one takes the value's type."""
    if isinstance(part, dict):
        return {key: _filled(value, values) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, values) for value in part]
    if isinstance(part, str):
        for name, value in values.items():
            if part == f"{{{{ {name} }}}}":
                return value
            part = part.replace(f"{{{{ {name} }}}}", str(value))
    return part


MADE = [*_releases(), *_jobs()]
ALL = [*_objects(), *MADE]


def _pods() -> list[tuple[str, dict[str, Any]]]:
    return [
        (where, found["spec"]["template"]["spec"])
        for where, found in ALL
        if "template" in found.get("spec", {})
    ]


@pytest.mark.parametrize(
    "found", [found for _, found in MADE], ids=[where.replace("/", " ") for where, _ in MADE]
)
def test_what_kustomize_does_not_see_fits_its_schema(found: dict[str, Any]) -> None:
    kubernetes_validate.validate(found, SCHEMA, strict=True)


def test_every_file_is_in_a_kustomization() -> None:
    for folder in (FOLDER / "base", FOLDER / "overlays" / "cpu", FOLDER / "overlays" / "gpu"):
        text = (folder / "kustomization.yaml").read_text()
        for path in folder.iterdir():
            assert path.name == "kustomization.yaml" or path.name in text, path


def test_there_is_no_secret_and_no_password_in_a_file() -> None:
    assert not [where for where, found in ALL if found["kind"] == "Secret"]
    for where, pod in _pods():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            for variable in container.get("env", ()):
                secret = any(
                    word in variable["name"] for word in ("PASSWORD", "AUTH_STRING", "_KEY", "CONNECTION_URL")
                )
                if secret and not variable["name"].endswith(("SECRET_NAME", "SECRET_KEY")):
                    assert "secretKeyRef" in variable["valueFrom"], f"{where}: {variable['name']}"
    for line in (FOLDER / "base" / "settings.env").read_text().splitlines():
        assert not any(word in line for word in ("PASSWORD", "SECRET", "TOKEN", "AUTH_STRING")), line


@pytest.mark.parametrize(("where", "pod"), _pods(), ids=[where for where, _ in _pods()])
def test_a_pod_is_not_root_and_cannot_write_its_root_file_system(where: str, pod: dict[str, Any]) -> None:
    context = pod["securityContext"]
    assert context["runAsNonRoot"]
    assert context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def test_only_workers_and_the_controller_have_a_token_for_the_api() -> None:
    with_token = {where.split("/")[-1] for where, pod in _pods() if pod["automountServiceAccountToken"]}
    assert with_token == {"worker-cpu", "worker-gpu", "controller"}


def test_a_release_is_probed_at_its_version() -> None:
    for where, found in _releases():
        if found["kind"] == "Deployment":
            (container,) = found["spec"]["template"]["spec"]["containers"]
            for probe in ("startupProbe", "readinessProbe"):
                assert container[probe]["httpGet"]["path"] == "/v2/models/flights/versions/3/ready", where


def test_the_gpu_overlay_asks_for_gpus_and_tolerates_their_nodes() -> None:
    jobs, releases = dict(_jobs()), dict(_releases())
    for found in (jobs["overlays/gpu/gpu-pool.json"], releases["overlays/gpu/release.yaml:deployment"]):
        pod = found["spec"]["template"]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]
