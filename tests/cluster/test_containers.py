"""The images of docker/ are built, a model is trained and served by the services of docker/compose.yaml, and releases
run in the images as pods of the Kubernetes template do."""

import os
import secrets
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from serin.cluster.kubernetes.release_objects import ReleaseTemplate, build_deployment
from serin.machine.locks import locked
from serin.serving.client.client import Client, predict
from serin.serving.triton.installation import WHEEL
from serin.serving.triton.release_record import read_record
from serin.serving.triton.verify import verify_release
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store
from tests.cluster.namespaces import hosts, wait_for
from tests.cluster.part import FOLDER, need
from tests.cluster.podman import Podman
from tests.fakes.small_pipeline import NAME, parcels, small_spec, write_spec
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
BASE, POSTGRES, TRITON = (f"localhost/serin-{name}:1" for name in ("base", "postgres", "triton-base"))
IMAGES = {name: f"localhost/serin-{name}:{version('serin')}" for name in ("cpu", "serving", "triton")}
TEMPLATES = {"serving": "base/release.yaml", "triton": "overlays/gpu/release.yaml"}
PROFILE = ("--profile", "cpu")
HOME = "/var/lib/serin"
FILES = ROOT / "tests" / "cluster"
BUILT: set[str] = set()


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    for part in ("namespaces", "podman"):
        need(part)
    with (
        locked(FOLDER / "podman-images.lock"),  # two runs share the images, and one removes all containers
        hosts("containers", prefix="198.18.70") as network,
    ):
        engine = Podman(network["containers"], FOLDER / "podman")
        try:
            _remove_all(engine)  # of a run that was killed
            yield engine
        finally:
            _remove_all(engine)


def _remove_all(engine: Podman) -> None:
    engine("rm", "--all", "--force", "--volumes", check=False, within_s=300)
    engine("volume", "prune", "--force", check=False)


def image(engine: Podman, name: str) -> str:
    """Returns the tag of an image of docker/, which is built unless this run has built it."""
    if name not in BUILT:
        file, began = ROOT / "docker" / f"{name}.Dockerfile", time.monotonic()
        arguments = {"PYTHON_IMAGE": _base(engine)}
        if name == "triton":  # without NVIDIA's image and GPUs
            given = {"BASE": BASE, "WHEEL": WHEEL}
            engine.build(FILES / "triton.Dockerfile", TRITON, context=FILES, arguments=given)
            arguments = {"TRITON_IMAGE": TRITON, "ONNXRUNTIME": "onnxruntime"}
        engine.build(file, IMAGES[name], context=ROOT, arguments=arguments)
        size = engine.inspect(IMAGES[name])["Size"] - engine.inspect(BASE)["Size"]
        print(f"{name}: built in {time.monotonic() - began:.0f} s, {size / 1e6:,.0f} MB above its base")
        BUILT.add(name)
    return IMAGES[name]


def _base(engine: Podman) -> str:
    if not engine.has_image(BASE):
        engine.import_base(BASE)
    return BASE


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_no_root_no_secret_and_a_health_check(podman: Podman, name: str) -> None:
    found = podman.inspect(image(podman, name))
    assert found["User"] == "10001:10001"
    assert "CMD" in found["Healthcheck"]["Test"]
    variables = " ".join(found["Config"]["Env"])
    assert not any(word in variables.upper() for word in ("PASSWORD", "SECRET", "TOKEN", "AUTH"))
    history = podman("history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGES[name])
    assert "no-index" not in history
    look = "test ! -s /etc/pip.conf && test ! -e /wheels/torch* && test ! -w /opt/serin && id -u"
    assert podman("run", "--rm", IMAGES[name], "sh", "-c", look).strip() == "10001"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_image_that_serves_has_no_torch(podman: Podman, name: str) -> None:
    code = "import importlib.util as u; print([u.find_spec(name) is not None for name in ('torch', 'serin')])"
    found = podman("run", "--rm", image(podman, name), "/opt/serin/bin/python", "-c", code)
    assert found.strip() == "[False, True]"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the images' user, whose store has a version that was exported for a GPU."""
    monkeypatch.setenv("SERIN_HOME", str(tmp_path))
    bundles.publish(Store.open(), bias=0.5, in_two=True, spec=yaml.safe_dump(small_spec(tmp_path)))
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 10001, 10001)
    return tmp_path


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_release_s_pod_of_the_template_runs_in_its_image(podman: Podman, name: str, home: Path) -> None:
    release = Release(model=MODEL, version=1)
    template = ReleaseTemplate.read(ROOT / "deployments" / "kubernetes" / TEMPLATES[name])
    pod = build_deployment(template, release, "releases", ServingSpec(), 0)["spec"]["template"]["spec"]
    (prepare,), (triton,) = pod["initContainers"], pod["containers"]
    for container in (prepare, triton):
        assert f"localhost/{container['image']}" == image(podman, name)
    podman("run", "--rm", *_options(pod, prepare, home), *prepare["command"], within_s=300)
    record = read_record(home / "releases" / release.name)
    assert record is not None
    assert record.served.backend == "onnx_native", record.served
    bundle = Store.open().bundle(MODEL, 1)
    asked = (*_options(pod, triton, home), *triton["command"])
    with podman.running(*asked) as running, podman.host.inside():
        place = Endpoint(http=f"{_address(podman, running)}:8000", grpc=f"{_address(podman, running)}:8001")
        probe = triton["readinessProbe"]["httpGet"]["path"]
        wait_for(
            lambda: _is_up(podman, running, f"http://{place.http}{probe}"), within_s=300, what="the release"
        )
        verify_release(release, place, bundle)
        served = predict(place.http, MODEL, bundles.rows(5), SCHEMA, "http", 1)["score"]
    assert (served == bundles.score(bundle.path, bundles.rows(5))).all()


def _options(pod: dict[str, Any], container: dict[str, Any], home: Path) -> list[str]:
    """What a kubelet makes of a container, as options of `podman run`, its image last."""
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    limits = container["resources"]["limits"]
    words = ["--read-only", "--user", user, "--cap-drop", "all", "--security-opt", "no-new-privileges"]
    words += [
        "--memory",
        limits["memory"].replace("Gi", "g"),
        "--volume",
        f"{home}:{HOME}",
        "--tmpfs",
        "/tmp",
    ]
    variables = {"SERIN_HOME": HOME, "HOME": "/tmp"}
    return [
        *words,
        *(word for pair in variables.items() for word in ("--env", "=".join(pair))),
        container["image"],
    ]


def _address(podman: Podman, container: str) -> str:
    return str(podman.inspect(container)["NetworkSettings"]["IPAddress"])


def _is_up(podman: Podman, container: str, url: str) -> bool:
    assert podman.inspect(container)["State"]["Running"], podman("logs", "--tail", "30", container)
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.timeout(3600)
def test_the_image_for_gpus_rolls_out_a_version_as_a_whole_stack(podman: Podman, home: Path) -> None:
    asked = ("--volume", f"{home}:{HOME}", image(podman, "triton"))
    with podman.running(*asked) as running, podman.host.inside():
        url = f"http://{_address(podman, running)}:8080"
        live = f"{url}/v2/health/live"
        wait_for(lambda: _is_up(podman, running, live), within_s=300, what="the stack")
        podman("exec", running, "/opt/serin/bin/serin", "rollout", "start", f"{MODEL}:1", within_s=300)
        with Client(url, MODEL) as client:
            served = client.predict_wire(bundles.rows(5), SCHEMA)["score"]
        podman("stop", running)
        assert podman.inspect(running)["State"]["ExitCode"] == 0
    assert (served == bundles.score(Store.open().bundle(MODEL, 1).path, bundles.rows(5))).all()


@pytest.mark.timeout(3600)
def test_the_compose_file_trains_a_model_and_serves_it(podman: Podman) -> None:
    data = Path(tempfile.mkdtemp(prefix="serin-compose-"))
    variables = {
        "PYTHON_IMAGE": BASE,
        "POSTGRES_IMAGE": POSTGRES,
        "POSTGRES_PASSWORD": secrets.token_hex(12),
        "PREFECT_PASSWORD": secrets.token_hex(12),
        "SERIN_DATA": str(data),
    }
    for name in ("cpu", "serving"):
        image(podman, name)
    podman.build(FILES / "postgres.Dockerfile", POSTGRES, context=FILES, arguments={"BASE": BASE})
    try:
        _write_pipeline(data)
        with podman.checking_health():
            _up(podman, variables)
            _train_and_ask(podman)
        podman.compose(COMPOSE, *PROFILE, "down", "--volumes", variables=variables)
        assert podman("ps", "--all", "--quiet").split() == []
        assert podman("volume", "ls", "--quiet").split() == []
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _write_pipeline(folder: Path) -> None:
    """Readable by the user of the containers, with paths as they see them."""
    usual = small_spec(folder)
    tables = {"tables": {"parcels": "/data/parcels.parquet"}}
    write_spec(folder, {**usual, "data": {**usual["data"], **tables}})
    pq.write_table(parcels(20, seed=3), folder / "ask.parquet")
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _up(podman: Podman, variables: dict[str, str]) -> None:
    """Service by service: this Podman cannot wait for a health check, as the engines that the file is for do."""

    def start(service: str) -> None:
        podman.compose(
            COMPOSE, *PROFILE, "up", "--detach", "--no-build", "--no-deps", service, variables=variables
        )

    for service in ("postgres", "prefect"):
        start(service)
        _wait_for_health(podman, service)
    start("deploy")
    deploy = _container(podman, "deploy")
    assert podman("wait", deploy, within_s=600).strip() == "0", podman("logs", deploy)
    for service in ("worker-cpu", "worker-gpu-on-cpu", "serving"):
        start(service)
    for service in ("worker-cpu", "worker-gpu-on-cpu", "serving"):
        _wait_for_health(podman, service)


def _container(podman: Podman, service: str) -> str:
    label = f"label=io.podman.compose.service={service}"
    (name,) = podman("ps", "--all", "--filter", label, "--format", "{{.Names}}").split()
    return name


def _wait_for_health(podman: Podman, service: str) -> None:
    name = _container(podman, service)

    def healthy() -> bool:
        state = podman.inspect(name)["State"]
        assert state["Running"], podman("logs", "--tail", "30", name)
        return bool(state["Health"]["Status"] == "healthy")

    wait_for(healthy, within_s=600, every_s=1.0, what=f"{service} to be healthy")


def _train_and_ask(podman: Podman) -> None:
    command = "prefect --no-prompt deployment run pipeline/inline --param spec=/data/spec.yaml --watch"
    worker = _container(podman, "worker-cpu")
    podman("exec", worker, *command.split(), within_s=1200)
    with podman.host.inside(), Client("http://127.0.0.1:8080", NAME) as model:
        rows = parcels(20, seed=3).drop_columns(["hours"]).to_pandas()
        scores = model.predict(rows)["score"]
    assert scores.shape[0] == 20
    assert ((scores >= 0) & (scores <= 1)).all()
    assert scores.std() > 0
