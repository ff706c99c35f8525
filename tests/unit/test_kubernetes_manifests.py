"""deployments/kubernetes as files: kustomize is not needed here (make cluster-test builds and applies the overlays)."""

import json
import os
import subprocess
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prefect.client.schemas.objects import Flow, FlowRun
from prefect.states import Pending

from deployments.workers.kubernetes_worker import KubernetesStageWorker
from serin.cluster.controller import BEAT, beat
from serin.cluster.kubernetes.autoscaler import VERSIONS, build_autoscaler
from serin.cluster.kubernetes.release_objects import ReleaseTemplate, build_deployment, build_service
from serin.cluster.kubernetes.release_pod import LOADS_S
from serin.errors import KeyFileBroken
from serin.serving.envoy.keys import KeyFile
from serin.serving.triton.repository import Capacity
from serin.spec.serving import ReplicaRange, ServingSpec
from serin.store.artifacts import Release
from serin.windows.valkey_place import ValkeyPlace
from tests.kit.network_policies import Peer, allows

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
        for gpus in (0, 1):
            made = build_deployment(template, RELEASE, "serin-releases", ServingSpec(), gpus)
            yield f"{where}:deployment with {gpus} GPUs", made
        yield f"{where}:service", build_service(template, RELEASE, "serin-releases")
        scaled = ServingSpec(replicas=ReplicaRange(min=2, max=8))
        capacity = Capacity(in_flight=16, requests_per_s=500.0)
        made = build_autoscaler(template, RELEASE, "serin-releases", scaled, capacity, VERSIONS[0])
        yield f"{where}:autoscaler", made


def _jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The Jobs as the worker of the manifests makes them."""
    worker: Any = KubernetesStageWorker
    flow = Flow(id=uuid.uuid4(), name="pipeline", labels={})  # of its name Prefect makes a label
    run = FlowRun(id=uuid.uuid4(), flow_id=flow.id, name="stage", state=Pending())
    for path in POOLS:
        template = json.loads(path.read_text())
        values = {name: each.get("default") for name, each in template["variables"]["properties"].items()}
        values.update(name="stage", labels={}, annotations={}, env={}, command="prefect flow-run execute")
        configuration = worker.job_configuration(**_filled(template["job_configuration"], values))
        configuration.prepare_for_flow_run(run, flow=flow)
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


def test_a_job_knows_its_image() -> None:
    """A stage compares it with `environment.image` of its spec."""
    for _, job in _jobs():
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert {"name": "SERIN_IMAGE", "value": container["image"]} in container["env"]


MADE = [*_releases(), *_jobs()]
ALL = [*_objects(), *MADE]


def _workloads() -> list[tuple[str, dict[str, Any]]]:
    """Everything that makes pods, also what the controller and Prefect's workers make."""
    found = [(where, each) for where, each in ALL if "template" in each.get("spec", {})]
    kinds = {each["kind"] for _, each in ALL}
    assert not kinds - {"Deployment", "StatefulSet", "Job"} - WITHOUT_PODS, (
        "a kind that this walk does not know"
    )
    return found


WITHOUT_PODS = {
    "ConfigMap", "Namespace", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "PriorityClass", "Role",
    "RoleBinding", "Service", "ServiceAccount", "HorizontalPodAutoscaler",
}  # fmt: skip


def _pods() -> list[tuple[str, dict[str, Any]]]:
    return [(where, found["spec"]["template"]["spec"]) for where, found in _workloads()]


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


@pytest.mark.parametrize(
    "found", [found for _, found in MADE], ids=[where.replace("/", " ") for where, _ in MADE]
)
def test_what_kustomize_does_not_see_fits_its_schema(found: dict[str, Any]) -> None:
    kubernetes_validate.validate(found, SCHEMA, strict=True)


def test_the_worker_is_of_the_type_that_makes_valid_jobs() -> None:
    made: dict[str, list[str]] = {}
    for where, pod in _pods():
        for container in _containers(pod):
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
    assert "ln --symbolic --force /etc/serin/keys/keys.json /var/lib/serin/keys.json\n" in link["command"][-1]
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
        for container in _containers(pod):
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
    for container in _containers(pod):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.mark.parametrize(("where", "found"), _workloads(), ids=[where for where, _ in _workloads()])
def test_a_container_that_stays_has_three_probes_and_one_that_ends_has_none(
    where: str, found: dict[str, Any]
) -> None:
    pod = found["spec"]["template"]["spec"]
    stays = found["kind"] != "Job"
    for container in pod["containers"]:
        assert [probe in container for probe in PROBES] == [stays] * 3, container["name"]
        if stays:  # it is given longer to start than to be replaced
            start, live = container["startupProbe"], container["livenessProbe"]
            slowest = max(start["periodSeconds"], start.get("timeoutSeconds", 1))
            assert start["failureThreshold"] * slowest >= 60
            assert live.get("failureThreshold", 3) * live["periodSeconds"] >= 45
    assert not [probe for each in pod.get("initContainers", ()) for probe in PROBES if probe in each]
    ports = {port["name"] for container in pod["containers"] for port in container.get("ports", ())}
    asked = [container[probe] for container in pod["containers"] for probe in PROBES if probe in container]
    assert {probe["httpGet"]["port"] for probe in asked if "httpGet" in probe} <= ports


UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def _bytes(size: str) -> int:
    return int(size[:-2]) * UNITS[size[-2:]]


@pytest.mark.parametrize(("where", "pod"), _pods(), ids=[where for where, _ in _pods()])
def test_a_container_asks_for_what_it_needs_and_its_memory_has_a_limit(
    where: str, pod: dict[str, Any]
) -> None:
    """No limit of cores: what it would take from a busy pod, it would not give to another one."""
    in_memory = {
        volume["name"]: _bytes(volume["emptyDir"]["sizeLimit"])
        for volume in pod["volumes"]
        if volume.get("emptyDir", {}).get("medium") == "Memory"
    }
    for container in _containers(pod):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests.keys() >= {"cpu", "memory"}
        assert requests.keys() - {"cpu"} >= limits.keys() - {"nvidia.com/gpu"} == {"memory"}
        assert requests.get("nvidia.com/gpu", limits.get("nvidia.com/gpu")) == limits.get("nvidia.com/gpu")
        shared = sum(in_memory.get(mount["name"], 0) for mount in container.get("volumeMounts", ()))
        assert _bytes(requests["memory"]) <= _bytes(limits["memory"]) >= 2 * shared


def test_a_gateway_has_room_to_record_requests_on_a_node_with_many_cores() -> None:
    (pod,) = [pod for where, pod in _pods() if where.endswith("Deployment/gateway")]
    (gateway,) = pod["containers"]
    sizes = {each["name"]: each.get("emptyDir", {}).get("sizeLimit") for each in pod["volumes"]}
    (shared,) = [sizes[each["name"]] for each in gateway["volumeMounts"] if each["mountPath"] == "/dev/shm"]
    assert _bytes(shared) // 4 // (1 << 20) >= 64, (
        "rings of one MB for each thread in a quarter of it (rings.py)"
    )


def _replicated() -> list[tuple[str, dict[str, Any]]]:
    return [(where, found) for where, found in _workloads() if found["spec"].get("replicas", 1) > 1]


def test_replicas_are_spread_over_nodes_and_zones() -> None:
    assert {where.rpartition("/")[2] for where, _ in _replicated()} >= {
        "controller",
        "gateway",
        "prefect-api",
    }
    for where, found in _replicated():
        constraints = found["spec"]["template"]["spec"]["topologySpreadConstraints"]
        keys = [each["topologyKey"] for each in constraints]
        assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"], where
        for each in constraints:
            assert each["labelSelector"] == found["spec"]["selector"], where
            assert (each["maxSkew"], each["whenUnsatisfiable"]) == (1, "ScheduleAnyway"), where


def test_a_drain_takes_one_replica_and_waits_for_nothing_that_never_comes() -> None:
    budgets = [found for _, found in ALL if found["kind"] == "PodDisruptionBudget"]
    selected: set[str] = set()
    for where, found in _workloads():
        labels = found["spec"]["template"]["metadata"]["labels"]
        namespace = found["metadata"]["namespace"]
        about = [
            each
            for each in budgets
            if each["metadata"]["namespace"] == namespace
            and each["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ]
        replicas = found["spec"].get("replicas", 1)
        assert len(about) == (1 if replicas > 1 else 0), where
        for each in about:
            wanted = each["spec"]
            assert replicas - wanted.get("minAvailable", replicas - wanted.get("maxUnavailable", 0)) >= 1, (
                where
            )
            assert wanted["unhealthyPodEvictionPolicy"] == "AlwaysAllow", where
            selected.add(each["metadata"]["name"])
    assert selected == {each["metadata"]["name"] for each in budgets}


OURS = {"serin-cpu", "serin-serving", "serin-triton", "serin-worker"}


def test_images_are_those_that_our_dockerfiles_make_and_those_that_they_are_built_on() -> None:
    root = FOLDER.parents[1]
    settings = dict(
        line.split("=", 1) for line in (root / "docker" / ".env").read_text().splitlines() if "=" in line
    )
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert settings["SERIN_VERSION"] == version
    composed = (root / "docker" / "compose.yaml").read_text()
    for name in OURS:
        assert f"image: {name}:${{SERIN_VERSION}}\n" in composed
        assert (root / "docker" / f"{name.removeprefix('serin-')}.Dockerfile").is_file()
    known = {f"{name}:{version}" for name in OURS} | {settings["POSTGRES_IMAGE"], settings["VALKEY_IMAGE"]}
    used = {container["image"] for _, pod in _pods() for container in _containers(pod)}
    assert used == known


def test_accounts_have_rights_in_one_namespace_and_none_to_give() -> None:
    roles = {found["metadata"]["name"]: found for _, found in ALL if found["kind"] == "Role"}
    assert set(roles) == {"controller", "worker"}
    for role in roles.values():
        for rule in role["rules"]:
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
            assert not {"secrets", "pods/exec", "roles", "rolebindings"} & set(rule["resources"])


OUTSIDE, SCRAPER = "outside", "prometheus"  # any address, and a pod in a namespace with the label for metrics
WORKERS, CLIENTS = ("worker-cpu", "worker-gpu"), ("gateway", "controller")
FLOWS = {
    *((each, name, port) for each in ("prefect-api", "prefect-services")
      for name, port in (("postgres", 5432), ("valkey", 6379), ("prefect-api", 4200))),
    *((each, "prefect-api", 4200) for each in (*WORKERS, "deploy", "stage")),
    *((each, "release", port) for each in CLIENTS for port in (8000, 8001)),
    *((each, OUTSIDE, 443) for each in (*WORKERS, *CLIENTS, "release", "stage")),
    *((each, OUTSIDE, 6443) for each in (*WORKERS, "controller")),
    *((each, "gateway", 8443) for each in (OUTSIDE, SCRAPER)),
    (SCRAPER, "gateway", 9464),
    (SCRAPER, "release", 8002),
}  # fmt: skip


MODELS = {"kubernetes.io/metadata.name": "models"}


def test_the_network_lets_through_exactly_what_the_parts_need() -> None:
    policies = [found for _, found in ALL if found["kind"] == "NetworkPolicy"]
    spaces = {
        each["metadata"]["name"]: each["metadata"]["labels"] for _, each in ALL if each["kind"] == "Namespace"
    }
    scraping = {"serin.dev/scrapes": "true"}
    peers = {
        OUTSIDE: Peer(name=OUTSIDE),
        SCRAPER: Peer(name=SCRAPER, namespace="monitoring", about=scraping),
    }
    ports: dict[str, set[int]] = {OUTSIDE: {443, 6443, 5432}, SCRAPER: {9090}}
    for _, found in _workloads():
        name, template = found["metadata"].get("name", "stage"), found["spec"]["template"]
        name = "release" if name == RELEASE.name else name
        namespace, labels = found["metadata"]["namespace"], template["metadata"]["labels"]
        peers[name] = Peer(name=name, namespace=namespace, labels=labels, about=spaces[namespace])
        listed = [port for each in template["spec"]["containers"] for port in each.get("ports", ())]
        ports[name] = {port["containerPort"] for port in listed}
    allowed = {
        (source, target, port)
        for source in peers
        for target in peers
        if not {source, target} <= {OUTSIDE, SCRAPER}
        for port in ports[target]
        if allows(policies, peers[source], peers[target], port)
    }
    assert allowed == FLOWS


def test_the_way_to_servers_elsewhere_is_a_valid_policy_of_the_parts_that_ask_them() -> None:
    component = yaml.safe_load((FOLDER / "servers-elsewhere" / "kustomization.yaml").read_text())
    assert component["kind"] == "Component"
    assert component["resources"] == ["network-policy.yaml"]
    policies = [found for _, found in ALL if found["kind"] == "NetworkPolicy"]
    (policy,) = [each for each in policies if each["metadata"]["name"] == "servers-elsewhere"]
    kubernetes_validate.validate(policy, SCHEMA, strict=True)
    ours = [each for each in policies if each is not policy]
    server = Peer(name="server", namespace="models", labels={"app": "sentiment"}, about=MODELS)
    for name in ("gateway", "controller", "prefect-api"):
        labels = {"app.kubernetes.io/name": name}
        pod = Peer(name=name, namespace="serin", labels=labels)
        assert not allows(ours, pod, server, 8000), "nothing reaches it without the component"
        assert allows([*ours, policy], pod, server, 8000) == (name in CLIENTS)


def test_gateways_alone_reach_the_events_that_they_share_and_get_the_password_in_a_file() -> None:
    component = yaml.safe_load((FOLDER / "shared-events" / "kustomization.yaml").read_text())
    policies = [found for _, found in ALL if found["kind"] == "NetworkPolicy"]
    (policy,) = [each for each in policies if each["metadata"]["name"] == "shared-events"]
    kubernetes_validate.validate(policy, SCHEMA, strict=True)
    ours = [each for each in policies if each is not policy]
    server = Peer(
        name="events",
        namespace="valkey",
        labels={"app": "events"},
        about={"kubernetes.io/metadata.name": "valkey"},
    )
    for name in ("gateway", "controller", "prefect-api"):
        pod = Peer(name=name, namespace="serin", labels={"app.kubernetes.io/name": name})
        assert not allows(ours, pod, server, 6380)
        assert allows([*ours, policy], pod, server, 6380) == (name == "gateway")
    (patch,) = component["patches"]
    gateway = dict(ALL)["base/gateway.yaml:Deployment/gateway"]
    changed = json.loads(json.dumps(gateway))
    for each in yaml.safe_load(patch["patch"]):
        place = changed
        for part in each["path"].strip("/").split("/")[:-1]:
            place = place[int(part)] if part.isdecimal() else place[part]
        place.append(each["value"])
    kubernetes_validate.validate(changed, SCHEMA, strict=True)
    (container,) = changed["spec"]["template"]["spec"]["containers"]
    found = {each["name"]: each.get("value") for each in container["env"]}
    assert ValkeyPlace.read(found["SERIN_EVENTS"] or "").tls
    assert all(
        str(found[f"SERIN_EVENTS_{name}"]).startswith("/etc/serin/events/")
        for name in ("PASSWORD_FILE", "CA")
    )


def test_only_workers_and_the_controller_have_a_token_for_the_api() -> None:
    with_token = {where.split("/")[-1] for where, pod in _pods() if pod["automountServiceAccountToken"]}
    assert with_token == {"worker-cpu", "worker-gpu", "controller"}


def test_a_release_is_probed_at_its_version() -> None:
    for where, found in _releases():
        if found["kind"] == "Deployment":
            (container,) = found["spec"]["template"]["spec"]["containers"]
            start, ready = container["startupProbe"], container["readinessProbe"]
            assert ready["httpGet"]["path"] == "/v2/models/flights/versions/3/ready", where
            assert start["exec"]["command"][-2:] == ["verify", "flights-v3"], where
            assert start["timeoutSeconds"] > LOADS_S, where


def test_the_gpu_overlay_asks_for_gpus_and_tolerates_their_nodes() -> None:
    jobs, releases = dict(_jobs()), dict(_releases())
    asking = releases["overlays/gpu/release.yaml:deployment with 1 GPUs"]
    for found in (jobs["overlays/gpu/gpu-pool.json"], asking):
        pod = found["spec"]["template"]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert [each["key"] for each in pod["tolerations"]] == ["nvidia.com/gpu"]
