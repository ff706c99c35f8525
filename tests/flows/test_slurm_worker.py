"""The worker type `serin-slurm` on a real Prefect server. Slurm's commands are pretended here: see tests/cluster."""

import inspect
import json
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
from prefect.settings import PREFECT_WORKER_QUERY_SECONDS, get_current_settings, temporary_settings
from prefect.workers.base import BaseWorker

from deployments.workers.slurm import worker as module
from deployments.workers.slurm.worker import SlurmWorker
from serin.errors import PrefectGone
from serin.machine.environment import application_folder
from serin.prefect import rest_api
from serin.prefect.processes import SLURM_TYPE

_COMMANDS = {
    "sbatch": """n=$(($(ls "$D/jobs" | wc -l) + 1))
printf '%s\\n' "$@" > "$D/options-$n"; cat > "$D/script-$n"; env -0 > "$D/environment-$n"
for word in "$@"; do case $word in --job-name=*) name=${word#*=};; --qos=unknown)
  echo "sbatch: error: Batch job submission failed: Invalid qos specification" >&2; exit 1;; esac; done
echo "$n|$name|PENDING|0|Resources||" > "$D/jobs/$n"; echo "$n" """,
    "squeue": """[ -e "$D/silent" ] && { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }
cat "$D"/jobs/* 2>/dev/null; true""",
    "scancel": """sed -i 's/|PENDING|/|CANCELLED|/; s/|RUNNING|/|CANCELLED|/' "$D/jobs/$1" """,
    "scontrol": """echo "JobId=$4 ExitCode=0:15" """,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSlurm:
    folder: Path

    def add(self, name: str, state: str, *, restarts: int = 0) -> int:
        number = len(self.submitted()) + 1
        self.set(number, name, state, restarts=restarts)
        return number

    def set(self, number: int, name: str, state: str, *, restarts: int = 0) -> None:
        (self.folder / "jobs" / str(number)).write_text(f"{number}|{name}|{state}|{restarts}|None|n1|\n")

    def submitted(self) -> list[str]:
        """The names of all jobs there ever were."""
        files = sorted((self.folder / "jobs").iterdir(), key=lambda path: int(path.name))
        return [path.read_text().split("|")[1] for path in files]

    def environment(self, number: int) -> dict[str, str]:
        words = (self.folder / f"environment-{number}").read_bytes().decode().split("\0")
        return dict(word.split("=", 1) for word in words if word)

    def options(self, number: int) -> list[str]:
        return (self.folder / f"options-{number}").read_text().splitlines()


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Puts the commands first on PATH."""
    (folder / "jobs").mkdir(parents=True)
    (folder / "bin").mkdir()
    for name, script in _COMMANDS.items():
        file = folder / "bin" / name
        file.write_text(f"#!/bin/bash\nD={folder}\n{script}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    return FakeSlurm(folder=folder)


pytestmark = pytest.mark.usefixtures("prefect_server", "home")
T = TypeVar("T")
TEMPLATES = application_folder() / "deployments" / "slurm"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(module, "_POLL_S", 0.1)
    monkeypatch.setattr(module, "_UNSUBMITTED_S", 0.2)
    monkeypatch.setattr("deployments.workers.slurm.commands._FRESH_S", 0.0)
    return fake_slurm(tmp_path / "slurm", monkeypatch)


def _patiently(ask: Callable[[], T]) -> T:
    """Asks again a server that had too much to do, for what may be repeated."""
    for _ in range(4):
        with suppress(PrefectGone):
            return ask()
    return ask()


class Pool:
    """A Slurm pool of one test, with a deployment."""

    def __init__(self) -> None:
        self.url = str(get_current_settings().api.url)
        self.name = f"slurm-{uuid.uuid4().hex[:8]}"
        template = json.loads((TEMPLATES / "gpu-pool.json").read_text())
        _patiently(
            lambda: rest_api.ensure_pool(self.url, self.name, kind=SLURM_TYPE, template=template, slots=None)
        )
        flow = _patiently(lambda: rest_api.call(self.url, "POST", "/flows/", {"name": "train"}))["id"]
        body = {
            "name": self.name,
            "flow_id": flow,
            "work_pool_name": self.name,
            "entrypoint": "flows.stages.train",
        }
        self.deployment = _patiently(lambda: rest_api.call(self.url, "POST", "/deployments/", body))["id"]

    def begin(self, **variables: Any) -> str:
        body = {"job_variables": variables}
        return str(
            rest_api.call(self.url, "POST", f"/deployments/{self.deployment}/create_flow_run", body)["id"]
        )

    def set_state(self, run: str, kind: str) -> None:
        state = {"state": {"type": kind, "name": kind.title()}, "force": True}
        _patiently(lambda: rest_api.call(self.url, "POST", f"/flow_runs/{run}/set_state", state))

    def state(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = _patiently(lambda: rest_api.call(self.url, "GET", f"/flow_runs/{run}"))
        return found

    def work(self, then: Callable[[], Awaitable[None]]) -> None:
        """Runs a worker of the pool beside `then`, and stops it after."""

        async def both() -> None:
            with temporary_settings({PREFECT_WORKER_QUERY_SECONDS: 0.2}):
                worker = SlurmWorker(work_pool_name=self.name, name="login", heartbeat_interval_seconds=1)
                async with anyio.create_task_group() as group:
                    group.start_soon(worker.start)
                    await then()
                    group.cancel_scope.cancel()

        anyio.run(both)

    async def until(self, run: str, state: str) -> dict[str, Any]:
        with anyio.fail_after(300):
            while True:
                found = await anyio.to_thread.run_sync(self.state, run)
                if found["state_type"] == state:
                    return found
                await anyio.sleep(0.1)


def test_prefect_finds_the_worker_type_and_templates_have_all_its_variables() -> None:
    found = BaseWorker.get_worker_class_from_type(SLURM_TYPE)
    assert found is not None
    assert Path(inspect.getfile(found)).parent == application_folder() / "deployments" / "workers" / "slurm"
    wanted = found.get_default_base_job_template()
    for pool in ("cpu", "gpu"):
        template = json.loads((TEMPLATES / f"{pool}-pool.json").read_text())
        assert template["job_configuration"].keys() == wanted["job_configuration"].keys() - {"command"}
        assert template["variables"]["properties"].keys() == wanted["variables"]["properties"].keys() - {
            "command"
        }


def test_a_run_is_submitted_with_what_it_needs_and_cancelled_with_its_job(slurm: FakeSlurm) -> None:
    pool = Pool()
    run = pool.begin(processes=2, time_minutes=7)

    async def then() -> None:
        await pool.until(run, "PENDING")
        await _holds(lambda: slurm.submitted() == [run])
        slurm.set(1, run, "RUNNING")
        pool.set_state(run, "RUNNING")
        pool.set_state(run, "CANCELLING")
        await pool.until(run, "CANCELLED")

    pool.work(then)
    assert slurm.submitted() == [run]
    assert {"--gres=gpu:2", "--time=7", f"--job-name={run}", "--dependency=singleton"} <= set(
        slurm.options(1)
    )
    assert slurm.environment(1)["PREFECT__FLOW_RUN_ID"] == run
    assert "was cancelled in Slurm" in pool.state(run)["state"]["message"]


def test_a_worker_that_is_started_again_follows_its_jobs_and_submits_nothing_twice(slurm: FakeSlurm) -> None:
    pool = Pool()
    followed, lost, never = pool.begin(), pool.begin(), pool.begin()
    pool.set_state(followed, "RUNNING")
    pool.set_state(lost, "RUNNING")
    pool.set_state(never, "PENDING")  # its worker was killed before sbatch
    job = slurm.add(followed, "RUNNING")

    async def then() -> None:
        found = await pool.until(lost, "CRASHED")
        assert "does not know its job" in found["state"]["message"]
        await _holds(lambda: slurm.submitted() == [followed, never])
        (slurm.folder / "silent").touch()  # no answer says nothing about a job
        await anyio.sleep(0.5)
        assert pool.state(followed)["state_type"] == "RUNNING"
        slurm.set(job, followed, "NODE_FAIL")
        (slurm.folder / "silent").unlink()
        await pool.until(followed, "CRASHED")

    pool.work(then)
    assert slurm.submitted() == [followed, never]


def test_a_requeued_job_shows_its_run_as_waiting(slurm: FakeSlurm) -> None:
    pool = Pool()
    run = pool.begin()
    pool.set_state(run, "RUNNING")
    job = slurm.add(run, "RUNNING")

    async def then() -> None:
        slurm.set(job, run, "PENDING", restarts=1)
        await pool.until(run, "PENDING")
        slurm.set(job, run, "RUNNING", restarts=1)
        pool.set_state(run, "COMPLETED")
        slurm.set(job, run, "COMPLETED", restarts=1)

    pool.work(then)
    assert pool.state(run)["state_type"] == "COMPLETED"
    assert slurm.submitted() == [run]


@pytest.mark.parametrize("qos", [None, "serin-urgent"])
def test_a_quality_of_service_that_slurm_ignores_is_said_in_the_log(
    slurm: FakeSlurm, qos: str | None
) -> None:
    pool = Pool()
    run = pool.begin(**({"qos": qos} if qos else {}))

    def log() -> str:
        return "\n".join(_patiently(lambda: rest_api.run_log(pool.url, run, lines=100)))

    async def then() -> None:
        await _holds(lambda: slurm.submitted() == [run])
        await _holds(lambda: "waits (Resources)" in log())

    pool.work(then)
    said = "without its quality of service serin-urgent: this cluster has no accounting database"
    assert (said in log()) == (qos is not None)
    assert (f"--qos={qos}" in slurm.options(1)) == (qos is not None)


def test_a_quality_of_service_that_slurm_lacks_is_refused_by_name(slurm: FakeSlurm) -> None:
    pool = Pool()
    run = pool.begin(qos="unknown")
    found: dict[str, Any] = {}

    async def then() -> None:
        found.update(await pool.until(run, "CRASHED"))

    pool.work(then)
    assert "Invalid qos specification 'unknown', which `priority` of the spec" in found["state"]["message"]
    assert slurm.submitted() == []


async def _holds(check: Callable[[], bool]) -> None:
    with anyio.fail_after(300):
        while True:
            if check():
                return
            await anyio.sleep(0.1)
