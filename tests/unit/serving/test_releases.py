import json
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest

from serin.errors import (
    BundleUntrusted,
    FileBroken,
    NotFound,
    ReleaseNotReady,
    TritonInstallFailed,
    TritonMissing,
)
from serin.machine.process import Process, ProcessState
from serin.serving.triton import installation
from serin.serving.triton.installation import TritonInstall, find_triton, install_triton, shortcomings
from serin.serving.triton.process import new_place, reclaim_shared_memory, triton_process
from serin.serving.triton.releases import Releases
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.store.trust import Trust, create_key, public_pem, read_private_key, sign_version
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

INSTALL = TritonInstall(
    server=Path("/t/bin/tritonserver"),
    backends=Path("/t/backends"),
    python_folder=Path("/t/python"),
    libraries=(Path("/t/lib"), Path("/p/lib")),
)
V1 = Release(model=MODEL, version=1)


class FakeHost:
    """Remembers what it was told; whether something runs is up to the test."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.states: dict[str, ProcessState] = {}
        self.number = 1

    def start(self, process: Process) -> None:
        self.processes[process.name] = process
        self.states[process.name] = "running"

    def stop(self, name: str) -> None:
        self.states.pop(name, None)

    def state(self, name: str) -> ProcessState:
        return self.states.get(name, "absent")

    def pid(self, name: str) -> int | None:
        return self.number if self.state(name) == "running" else None


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
def releases(tmp_path: Path, host: FakeHost) -> Releases:
    store = Store(str(tmp_path / "store"))
    for bias in (0.0, 1.0):
        bundles.publish(store, bias=bias)
    (tmp_path / "backends" / "python").mkdir(parents=True)
    install = replace(INSTALL, backends=tmp_path / "backends")
    return Releases(tmp_path / "releases", host=host, store=store, install=install, devices=lambda: ())


def test_a_release_that_was_never_started_is_absent(releases: Releases) -> None:
    assert releases.state(V1) == "absent"
    assert releases.running() == []
    with pytest.raises(ReleaseNotReady, match="was not started"):
        releases.endpoint(V1)
    releases.stop(V1)


def test_a_version_that_was_never_published_is_not_started(releases: Releases, host: FakeHost) -> None:
    with pytest.raises(NotFound):
        releases.start(Release(model=MODEL, version=9))
    assert host.processes == {}


def test_a_version_that_no_trusted_key_has_signed_is_not_started(
    releases: Releases, host: FakeHost, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    (tmp_path / "key.pub").write_text(public_pem(create_key(key)))
    releases._trust = Trust(tmp_path / "trusted-keys")
    releases._trust.add("ci", tmp_path / "key.pub")
    with pytest.raises(BundleUntrusted, match="it is not signed"):
        releases.start(V1)
    assert host.processes == {}
    assert releases.running() == []
    assert not (tmp_path / "releases").exists(), "nothing of it was read or reserved"
    store = releases._store
    sign_version(store, MODEL, 1, Path(store.bundle(MODEL, 1).path), read_private_key(key))
    releases.start(V1)
    assert list(host.processes) == [V1.name]


def test_releases_get_places_of_their_own(releases: Releases, host: FakeHost) -> None:
    both = [V1, Release(model=MODEL, version=2)]
    for release in both:
        releases.start(release)
    assert releases.running() == both
    ports = [port for release in both for port in releases._place(release).ports]  # type: ignore[union-attr]
    assert len(set(ports)) == 6
    commands = [" ".join(process.command) for process in host.processes.values()]
    assert all(f"--http-port={ports[3 * number]}" in command for number, command in enumerate(commands))


def test_a_process_that_failed_is_dead_and_one_that_does_not_answer_yet_is_starting(
    releases: Releases, host: FakeHost
) -> None:
    releases.start(V1)
    assert releases.state(V1) == "starting"
    host.states[V1.name] = "failed"
    assert releases.state(V1) == "dead"


def test_a_release_that_its_host_has_restarted_is_starting_and_not_dead(
    releases: Releases, host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new process must have the time to load: it would be stopped as one that does not answer any more."""
    answer = True
    monkeypatch.setattr("serin.serving.triton.probe.answers", lambda *_, **__: answer)
    releases.start(V1)
    assert releases.state(V1) == "ready"
    answer, host.number = False, 2
    assert releases.state(V1) == "starting"
    host.number = 1
    assert releases.state(V1) == "dead"


def test_a_slow_model_has_the_time_of_a_request_for_its_first_row_and_later_rows_are_like_it(
    releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, row_s, waited_s = 0.0, 0.0, []

    def answers(*_: object, timeout_s: float) -> bool:
        nonlocal now
        waited_s.append(timeout_s)
        now += row_s
        return row_s < timeout_s

    monkeypatch.setattr("serin.serving.triton.probe.answers", answers)
    monkeypatch.setattr("serin.serving.triton.probe.time.monotonic", lambda: now)
    releases.start(V1)
    for seconds, state in ((10.0, "starting"), (3.0, "ready"), (9.0, "ready"), (0.1, "ready"), (2.5, "dead")):
        row_s = seconds
        assert releases.state(V1) == state
    assert waited_s == [4.0, 4.0, 12.0, 36.0, 2.0], "at first as its spec says of a request"


def test_a_release_started_again_keeps_its_place_unless_somebody_took_a_port(
    releases: Releases, host: FakeHost
) -> None:
    releases.start(V1)
    before = releases.endpoint(V1)
    host.states[V1.name] = "failed"
    releases.start(V1)
    assert releases.endpoint(V1) == before
    host.states[V1.name] = "failed"
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", int(before.grpc.split(":")[1])))
        squatter.listen()
        releases.start(V1)
    assert releases.endpoint(V1) != before


def test_a_release_s_record_is_for_its_owner(releases: Releases, tmp_path: Path) -> None:
    releases.start(V1)
    record = tmp_path / "releases" / V1.name / "release.json"
    assert record.stat().st_mode & 0o777 == 0o600
    assert json.loads(record.read_text())["format"] == "serin.release"


def test_a_damaged_record_harms_neither_its_running_release_nor_another_one(
    releases: Releases, host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serin.serving.triton.probe.answers", lambda *_, **__: True)
    releases.start(V1)
    before, record = releases.endpoint(V1), tmp_path / "releases" / V1.name / "release.json"
    record.write_bytes(record.read_bytes()[:90])
    assert (releases.endpoint(V1), releases.state(V1)) == (before, "ready"), "it is remembered"
    v2 = Release(model=MODEL, version=2)
    releases.start(v2)
    assert releases.state(v2) == "ready"
    again = Releases(
        tmp_path / "releases", host=host, store=releases._store, install=releases._install, devices=lambda: ()
    )
    assert (again.state(V1), again.state(v2)) == ("dead", "ready")
    with pytest.raises(FileBroken, match=r"release\.json.*move it away"):
        again.endpoint(V1)
    assert len(record.read_bytes()) == 90
    again.start(V1)
    assert again.state(V1) == "ready"
    assert [len(path.read_bytes()) for path in record.parent.glob("release.json.broken-*")] == [90], (
        "it is kept"
    )


def test_a_record_of_another_release_is_not_used(releases: Releases, tmp_path: Path) -> None:
    releases.start(V1)
    copy = tmp_path / "releases" / f"{MODEL}-v9"
    shutil.copytree(tmp_path / "releases" / V1.name, copy)
    with pytest.raises(FileBroken, match=f"it is the record of {V1.name}"):
        releases.endpoint(Release(model=MODEL, version=9))


def test_what_is_stopped_is_forgotten(releases: Releases, tmp_path: Path) -> None:
    releases.start(V1)
    releases.stop(V1)
    assert releases.state(V1) == "absent"
    assert not (tmp_path / "releases" / V1.name).exists()


def test_a_server_listens_on_loopback_only_and_guards_what_could_change_it(tmp_path: Path) -> None:
    place = new_place(V1, (1, 2, 3))
    process = triton_process(INSTALL, V1, tmp_path, place, tmp_path / "log")
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in process.command[1:] if "=" in flag)
    assert {value for name, value in flags.items() if name.endswith("-address")} == {"127.0.0.1"}
    assert flags["http-address"] == flags["grpc-address"] == flags["metrics-address"]
    assert flags["model-control-mode"] == "none"
    assert "--disable-auto-complete-config" in process.command
    apis = "model-repository,model-config,shared-memory,statistics,trace,logging"
    assert flags["http-restricted-api"] == flags["grpc-restricted-protocol"] == f"{apis}:No Header=has\nthis"
    assert process.environment["PATH"].startswith("/t/python:")
    assert process.environment["LD_LIBRARY_PATH"] == "/t/lib:/p/lib"
    assert "PYTHONPATH" not in process.environment
    assert process.environment["EVENT_EPOLL_USE_CHANGELIST"] == "1"
    assert process.environment["CUDA_VISIBLE_DEVICES"] == "", "what has no memory there sees no GPU"


def test_only_the_release_s_own_shared_memory_is_reclaimed(tmp_path: Path) -> None:
    place, other = new_place(V1, (1, 2, 3)), new_place(V1, (1, 2, 3))
    for prefix in (place.shared_memory_prefix, other.shared_memory_prefix, "sem."):
        (tmp_path / f"{prefix}abc").touch()
    assert reclaim_shared_memory(place, tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_triton_that_was_named_is_the_only_one_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_TRITON", str(tmp_path))
    with pytest.raises(TritonMissing) as missing:
        find_triton()
    assert missing.value.fields["looked_in"] == [str(tmp_path)]
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_triton().server == tmp_path / "bin" / "tritonserver"


def test_a_triton_as_in_nvidias_container_gets_an_environment_without_a_second_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its libraries are compiled by tests/cluster/test_containers.py."""
    server, own = tmp_path / "opt", tmp_path / "env-triton"
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        (server / name).parent.mkdir(parents=True)
        (server / name).touch()
    monkeypatch.setenv("SERIN_TRITON", str(server))
    monkeypatch.setattr(installation, "default_folder", lambda: own)
    asked: list[str] = []
    completed: list[TritonInstall] = []
    monkeypatch.setattr(installation, "_complete", completed.append)

    def run(command: list[str], step: str) -> None:
        asked.extend(word for word in command if "==" in word)
        if step == "creating a virtual environment":
            (own / "bin").mkdir(parents=True)
            (own / "bin" / "python3").symlink_to(sys.executable)

    monkeypatch.setattr(installation, "_run", run)
    install = install_triton()
    assert asked == [installation._runtime(), installation.NUMPY]
    assert completed == [install]
    assert (install.server, install.python_folder) == (server / "bin" / "tritonserver", own / "bin")
    words = "; ".join(shortcomings(install))
    assert "no backend serin_onnx" in words
    assert "cancelled" not in words, "the guard is for the wheel's version"


def test_triton_gets_an_older_python_where_numpy_1_has_none_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installation._base_python((3, 12)) == sys.executable
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TritonInstallFailed, match="looking for a Python"):
        installation._base_python((3, 13))
    (tmp_path / "python3.11").touch(mode=0o755)
    assert installation._base_python((3, 13)) == str(tmp_path / "python3.11")


def test_an_installation_that_fails_says_at_which_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(installation, "default_folder", lambda: tmp_path / "file" / "env-triton")
    with pytest.raises(TritonInstallFailed, match="creating a virtual environment failed"):
        install_triton()


def test_triton_s_python_gets_the_onnx_runtime_of_this_environment() -> None:
    name, _, version = installation._runtime().partition("==")
    assert version == onnxruntime.__version__
    on_gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    assert name == ("onnxruntime-gpu[cuda,cudnn]" if on_gpu else "onnxruntime")


def test_what_our_own_triton_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    wheel = packages / "pytriton" / "tritonserver"
    for file in (
        wheel / "bin" / "tritonserver",
        wheel / "python_backend_stubs" / "3.11" / "triton_python_backend_stub",
        packages / "onnxruntime" / "__init__.py",
        packages / "numpy" / "__init__.py",
    ):
        file.parent.mkdir(parents=True)
        file.touch()
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (packages / "onnxruntime-1.0.0.dist-info").mkdir()
    monkeypatch.setenv("SERIN_TRITON", str(tmp_path))
    assert shortcomings(find_triton()) == [], "it is somebody else's"
    monkeypatch.setattr(installation, "default_folder", lambda: tmp_path)
    words = "; ".join(shortcomings(find_triton()))
    for part in (
        "no backend serin_onnx",
        "no guard against cancelled gRPC calls",
        f"its ONNX Runtime is 1.0.0, but this environment has {onnxruntime.__version__}",
    ):
        assert part in words


def test_what_a_triton_can_run_is_read_from_its_own_folders() -> None:
    install = find_triton()
    assert "python" in install.describe(gpus=False).backends
    assert install.describe(gpus=False).accelerators == frozenset(), "nobody asked"
    assert install.describe(gpus=True).accelerators <= {"cuda", "tensorrt"}
