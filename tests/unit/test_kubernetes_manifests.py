"""deployments/kubernetes as files: kustomize is not needed here (make cluster-test builds and applies the overlays)."""

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prefect.client.schemas.objects import FlowRun
from prefect.states import Pending

from deployments.workers.kubernetes_worker import KubernetesStageWorker
from serin.cluster.controller import BEAT, beat
from serin.cluster.kubernetes.release_objects import ReleaseTemplate, build_deployment, build_service
from serin.errors import KeyFileBroken
from serin.serving.envoy.keys import KeyFile
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Release

FOLDER = Path(__file__).resolve().parents[2] / "deployments" / "kubernetes"
SCHEMA = "1.36"
RELEASE = Release(model="flights", version=3)
TEMPLATES = [FOLDER / "base" / "release.yaml", FOLDER / "overlays" / "gpu" / "release.yaml"]
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
    """The Jobs as the worker of the manifests makes them."""
    worker: Any = KubernetesStageWorker
    run = FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="stage", state=Pending())
    for path in POOLS:
        template = json.loads(path.read_text())
        values = {name: each.get("default") for name, each in template["variables"]["properties"].items()}
        values.update(name="stage", labels={}, annotations={}, env={}, command="prefect flow-run execute")
        configuration = worker.job_configuration(**_filled(template["job_configuration"], values))
        configuration.prepare_for_flow_run(run)
        yield str(path.relative_to(FOLDER)), configuration.job_manifest


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


def test_the_worker_is_of_the_type_that_makes_valid_jobs() -> None:
    made: dict[str, list[str]] = {}
    for where, pod in _pods():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            if "--type" in (command := container.get("command", [])):
                assert command[command.index("--type") + 1] == "serin-kubernetes"
                if "work-pool" in command:
                    made.setdefault(where.rpartition("/")[2], []).append(command[command.index("create") + 1])
    # Also where deployments are made: that makes pools of another type otherwise.
    assert made == {"worker-cpu": ["cpu"], "worker-gpu": ["gpu"], "deploy": ["cpu", "gpu"]}


def test_a_job_runs_once_and_its_pod_says_nothing_about_that() -> None:
    for where, job in _jobs():
        assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (1, 1), where
        assert not {"completions", "parallelism"} & job["spec"]["template"]["spec"].keys(), where


def test_a_gateway_has_keys_and_tls_and_does_not_start_without_them() -> None:
    (pod,) = [pod for where, pod in _pods() if where.endswith("Deployment/gateway")]
    (gateway,) = pod["containers"]
    volumes = {volume["name"]: volume.get("secret") for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in gateway["volumeMounts"]}
    for folder, name in (("/etc/serin/tls", "serin-gateway-tls"), ("/etc/serin/keys", "serin-gateway-keys")):
        assert mounts[folder]["secretName"] == name
        assert not mounts[folder].get("optional")
    for option in ("--tls-cert=/etc/serin/tls/tls.crt", "--tls-key=/etc/serin/tls/tls.key"):
        assert option in gateway["command"]
    (link,) = pod["initContainers"]
    assert link["command"][-2:] == ["/etc/serin/keys/keys.json", "/var/lib/serin/keys.json"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert gateway[probe]["httpGet"]["scheme"] == "HTTPS"


def test_a_linked_key_file_is_followed_and_closes_the_gateway_when_it_is_lost(tmp_path: Path) -> None:
    """As a secret that kubelet replaces: the link in the home stays, the file behind it is another one."""
    home, secret = tmp_path / "home", tmp_path / "secret"
    made = KeyFile(path=secret / "keys.json")
    made.create("ada")
    home.mkdir()
    (home / "keys.json").symlink_to(secret / "keys.json")
    linked = KeyFile(path=home / "keys.json")
    ring, before = linked.read(), linked.signature()
    assert (ring.required, [key.name for key in ring.keys]) == (True, ["ada"])
    linked.remember(ring)
    made.revoke("ada")
    assert linked.signature() != before
    assert [key.state(0.0) for key in linked.read().keys] == ["revoked"]
    (secret / "keys.json").unlink()
    with pytest.raises(KeyFileBroken):
        linked.read()


WAITS = "waits for the store"
PROBED = [
    *(("livenessProbe", age_s, doing, age_s < 100) for age_s in (0, 60, 400) for doing in ("leads", WAITS)),
    *(("readinessProbe", 0, doing, doing != WAITS) for doing in ("leads", "stands by", WAITS)),
    ("startupProbe", 0, WAITS, True),
]


@pytest.mark.parametrize(("probe", "age_s", "doing", "passes"), PROBED)
def test_the_probes_of_the_controller_read_what_its_loop_writes(
    probe: str, age_s: float, doing: str, passes: bool, tmp_path: Path
) -> None:
    (pod,) = [pod for where, pod in _pods() if where.endswith("Deployment/controller")]
    command = pod["containers"][0][probe]["exec"]["command"]
    home = "/var/lib/serin"
    words = [word.replace(home, str(tmp_path)) for word in command]
    assert words != command
    assert f"{home}/{BEAT}" in " ".join(command)
    assert subprocess.run(words, check=False, capture_output=True).returncode != 0, "nothing is written yet"
    beat(tmp_path, doing)
    then = time.time() - age_s
    os.utime(tmp_path / BEAT, (then, then))
    assert (subprocess.run(words, check=False, capture_output=True).returncode == 0) == passes


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
