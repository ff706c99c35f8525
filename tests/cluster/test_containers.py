"""The images of docker/ are built, and a model is trained and served by the services of docker/compose.yaml."""

import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from serin.machine.locks import locked
from serin.serving.client.client import Client
from tests.cluster.namespaces import hosts, wait_for
from tests.cluster.part import FOLDER, need
from tests.cluster.podman import Podman
from tests.fakes.small_pipeline import NAME, parcels, small_spec, write_spec

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
BASE, POSTGRES = "localhost/serin-base:1", "localhost/serin-postgres:1"
IMAGES = {"cpu": "localhost/serin-cpu:latest", "serving": "localhost/serin-serving:latest"}
PROFILE = ("--profile", "cpu")


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """With every image that the profile `cpu` needs."""
    for part in ("namespaces", "podman"):
        need(part)
    with (
        locked(FOLDER / "podman-images.lock"),  # two runs share the images, and one removes all containers
        hosts("containers", prefix="198.18.70") as network,
    ):
        engine = Podman(network["containers"], FOLDER / "podman")
        try:
            _remove_all(engine)  # of a run that was killed
            _build(engine)
            yield engine
        finally:
            _remove_all(engine)


def _remove_all(engine: Podman) -> None:
    engine("rm", "--all", "--force", "--volumes", check=False, within_s=300)
    engine("volume", "prune", "--force", check=False)


def _build(engine: Podman) -> None:
    if not engine.has_image(BASE):
        engine.import_base(BASE)
    files = ROOT / "tests" / "cluster"
    engine.build(files / "postgres.Dockerfile", POSTGRES, context=files, arguments={"BASE": BASE})
    for name, tag in IMAGES.items():
        began = time.monotonic()
        file = ROOT / "docker" / f"{name}.Dockerfile"
        engine.build(file, tag, context=ROOT, arguments={"PYTHON_IMAGE": BASE})
        size = engine.inspect(tag)["Size"] - engine.inspect(BASE)["Size"]
        print(f"{name}: built in {time.monotonic() - began:.0f} s, {size / 1e6:,.0f} MB above its base")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_no_root_no_secret_and_a_health_check(podman: Podman, name: str) -> None:
    found = podman.inspect(IMAGES[name])
    assert found["User"] == "10001:10001"
    assert "CMD" in found["Healthcheck"]["Test"]
    variables = " ".join(found["Config"]["Env"])
    assert not any(word in variables.upper() for word in ("PASSWORD", "SECRET", "TOKEN", "AUTH"))
    history = podman("history", "--no-trunc", "--format", "{{.CreatedBy}}", IMAGES[name])
    assert "no-index" not in history
    look = "test ! -s /etc/pip.conf && test ! -e /wheels/torch* && test ! -w /opt/serin && id -u"
    assert podman("run", "--rm", IMAGES[name], "sh", "-c", look).strip() == "10001"


def test_the_image_that_serves_has_no_torch(podman: Podman) -> None:
    code = "import importlib.util as u; print([u.find_spec(name) is not None for name in ('torch', 'serin')])"
    assert podman("run", "--rm", IMAGES["serving"], "python", "-c", code).strip() == "[False, True]"


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
