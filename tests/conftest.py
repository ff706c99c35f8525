"""Before anything is collected: tests must not see or touch a developer's own stack, store or Prefect profile."""

import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.kit.s3"]
_STATE = Path(tempfile.mkdtemp(prefix="serin-tests-"))

for _name in [
    name for name in os.environ if name.startswith(("SERIN_", "PREFECT_")) and name != "SERIN_TRITON"
]:
    del os.environ[_name]
os.environ["SERIN_HOME"] = str(_STATE / "serin")
os.environ["PREFECT_HOME"] = str(_STATE / "prefect")
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["DO_NOT_TRACK"] = "1"
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # its handlers ended one in 20 of the processes that tests start

# The same examples in every run, however slow the machine: what fails is what was changed. Others are drawn by `make
# soak`, or with --hypothesis-profile=default --hypothesis-seed=N.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from tests.scheduling import ByScope

    return ByScope(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    from tests.scheduling import workers

    return workers()


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # imports leave little garbage, and each worker imports everything
    config, worker = session.config, os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and config.args == config.getini("testpaths"):
        from tests.scheduling import in_turn

        number, several = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args = in_turn(config.args[0], config.getini("norecursedirs"), number, several)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.scheduling import order

    items.sort(key=lambda item: order(item.nodeid))
    for item in items:
        if item.nodeid.startswith("tests/gpu/"):  # RAPIDS and the CUDA packages warn about themselves
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the imports made stays, so that the garbage of tests is looked for in little."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_STATE, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _sockets() -> Iterator[None]:
    """Short folders of sockets and small files in memory, as a session of a user has them, are gone with the tests."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK | os.X_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="st-", dir=place) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(autouse=True)
def _log_levels() -> None:
    """A task or a service that ran in this process, also in a fixture of several tests, made Serin's loggers talk."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "serin" and isinstance(logger, logging.Logger) and logger.level:
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A real Prefect server without a deployment, one for all tests: it takes seconds to start. It is the stack's,
    because Prefect's own refuses requests on a busy machine; its tables come from the template, if there is one."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL, get_current_settings
    from prefect.testing.utilities import prefect_test_harness

    from serin.prefect import prepared

    def start(server: SubprocessASGIServer) -> subprocess.Popen[bytes]:
        own = {
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        }
        harness = get_current_settings().to_environment_variables(exclude_unset=True)
        command = [sys.executable, "-m", "serin.prefect.server", str(server.port)]
        if prepared.revision(prepared.template_file()) is not None:
            _, _, database = str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value()).partition(":///")
            shutil.copyfile(prepared.template_file(), database)
        return subprocess.Popen(command, env={**os.environ, **harness, **own})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SubprocessASGIServer, "_run_uvicorn_command", start)
        with prefect_test_harness(server_startup_timeout=500):
            yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SERIN_HOME of the test's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("SERIN_HOME", str(folder))
    return folder
