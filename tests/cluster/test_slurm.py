"""Pipelines as Slurm jobs on two nodes: a real slurmctld, real slurmds, a real Prefect server and Serin's workers."""

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serin.errors import PrefectGone
from serin.machine.ports import free_ports
from serin.pipeline.needs import job_variables
from serin.prefect.follow import FINAL, begin_run
from serin.prefect.rest_api import Api, answers, call, run_log
from serin.spec.load import load_spec
from tests.cluster.slurm import NODES, SlurmCluster, documented, end, running_slurm, wait_until
from tests.fakes import slow_network
from tests.fakes.small_pipeline import small_spec, write_spec
from tests.kit.commands import serin_process
from tests.signals import hit

ROOT = Path(__file__).resolve().parents[2]
POOLS = ("cpu", "gpu")


@dataclass(kw_only=True)
class Scene:
    """What a user has: a home that all nodes see, a Prefect server, pools on Slurm."""

    cluster: SlurmCluster
    home: Path
    api: Api
    variables: dict[str, str]
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_worker(self, pool: str) -> None:
        template = ROOT / "deployments" / "slurm" / f"{pool}-pool.json"
        log = self.home / "logs" / f"worker-{pool}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.workers[pool] = subprocess.Popen(
                [
                    sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", pool,
                    "--type", "serin-slurm", "--name", f"slurm-{pool}", "--install-policy", "never",
                    "--base-job-template", str(template),
                ],
                cwd=ROOT, env=self.variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill_worker(self, pool: str) -> None:
        process = self.workers.pop(pool)
        process.kill()
        process.wait(30)

    def set_pool(self, pool: str, **defaults: Any) -> None:
        """Changes the defaults of a pool's variables, as its page in Prefect does."""
        template = json.loads((ROOT / "deployments" / "slurm" / f"{pool}-pool.json").read_text())
        for name, value in defaults.items():
            template["variables"]["properties"][name]["default"] = value
        call(self.api, "PATCH", f"/work_pools/{pool}", {"base_job_template": template})

    def begin(self, deployment: str, parameters: dict[str, Any], **variables: Any) -> str:
        """Requests a run; returns its id. `variables`: job variables of this run."""
        if not variables:
            return str(begin_run(self.api, deployment, parameters, tags=[])["id"])
        found = call(self.api, "GET", f"/deployments/name/{deployment}")
        body = {"parameters": parameters, "job_variables": variables}
        return str(call(self.api, "POST", f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def cancel(self, run: str) -> None:
        """Cancels a run as Prefect's page does."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        call(self.api, "POST", f"/flow_runs/{run}/set_state", {"state": state})

    def run(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = call(self.api, "GET", f"/flow_runs/{run}")
        return found

    def state(self, run: str) -> str:
        return str(self.run(run)["state_type"])

    def log(self, run: str) -> str:
        return "\n".join(run_log(self.api, run, lines=200))

    def job_of(self, run: str) -> dict[str, str] | None:
        found = [job for job in self.cluster.jobs() if job["JobName"] == run]
        return found[-1] if found else None

    def wait_for(self, run: str, *states: str, within_s: float = 600.0) -> dict[str, Any]:
        """Waits for a state of a run; at once an error when it has ended otherwise."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(PrefectGone):
                found = self.run(run)
                if found["state_type"] in states:
                    return found
                if found["state_type"] in FINAL or time.monotonic() > deadline:
                    raise AssertionError(
                        f"{found['name']} is {found['state_name']}: {found['state']['message']}\n{self.log(run)}\n"
                        f"{self.cluster.command('squeue', '-t', 'all')}\n{self._outputs()}"
                    )
            time.sleep(0.3)

    def wait_in_log(self, run: str, words: str, *, within_s: float = 600.0) -> None:
        wait_until(
            lambda: words in self.log(run), f"{words!r} in the log", lambda: self.log(run), within_s=within_s
        )

    def _outputs(self) -> str:
        files = sorted((self.home / "logs").rglob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


@contextlib.contextmanager
def slurm_scene(cluster: SlurmCluster, home: Path, **more: str) -> Iterator[Scene]:
    """`more`: variables of the server and the workers, and so of all jobs."""
    home.mkdir(mode=0o700, parents=True)
    (port,) = free_ports(1)
    login = f"serin:{secrets.token_urlsafe(24)}"
    url = f"http://{cluster.address}:{port}/api"
    variables = {
        **os.environ, **cluster.environment, "PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": login,
        "PREFECT_HOME": str(home / "prefect"), "SERIN_HOME": str(home), "SERIN_STORE": str(home / "store"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1", "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json", "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",
        "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", **more,
    }  # fmt: skip
    (home / "prefect").mkdir(mode=0o700)
    scene = Scene(cluster=cluster, home=home, api=Api(url, login), variables=variables)
    with contextlib.ExitStack() as stack:
        with (home / "server.log").open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "prefect", "--no-prompt", "server", "start", "--host", cluster.address,
                 "--port", str(port)],
                env={**variables, "PREFECT_SERVER_API_AUTH_STRING": login, "PREFECT_SERVER_DATABASE_TIMEOUT": "120",
                     "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "120"}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        stack.callback(end, server)
        wait_until(lambda: answers(url), "the Prefect server", (home / "server.log").read_text, within_s=500)
        stack.callback(lambda: [end(process) for process in scene.workers.values()])
        for pool in POOLS:
            scene.start_worker(pool)
        wait_until(lambda: _pools(scene.api) >= set(POOLS), "the pools", scene._outputs, within_s=500)
        deployed = subprocess.run(
            [sys.executable, "-m", "serin.cli", "deploy"], env=variables, capture_output=True, text=True
        )
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        yield scene


def _pools(api: Api) -> set[str]:
    return {pool["name"] for pool in call(api, "POST", "/work_pools/filter", {})}


pytestmark = pytest.mark.timeout(3600)  # a busy machine; waits are bounded

ENDLESS = 10**5
SLOW = {"module": f"{Path(slow_network.__file__)}:SlowNet", "options": {"pause_s": 0.05}}
BEGUN = "epoch 1"  # a line of the training


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("slurm")
    with (
        running_slurm(folder / "c", accounting=True) as cluster,
        slurm_scene(cluster, folder / "home") as made,
    ):
        made.set_pool("cpu", cores=1, memory_gb=2, time_minutes=20, options=[f"--nodelist={NODES[0]}"])
        made.set_pool("gpu", cores=2, memory_gb=2, gpus=1, time_minutes=20)
        yield made


@pytest.fixture(scope="module")
def dataset(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A dataset in the store, and the spec that it is of."""
    folder = tmp_path_factory.mktemp("data")
    spec = small_spec(folder)
    done = serin_process("etl", str(write_spec(folder, spec)), "--json", env=scene.variables)
    return {"spec": spec, "dataset": json.loads(done.stdout)}


def _training(dataset: dict[str, Any], *, epochs: int, seed: int, **parameters: Any) -> dict[str, Any]:
    """The parameters of a training that takes about two seconds for an epoch."""
    settings = {"epochs": epochs, "batch_rows": 64, "learning_rate": 0.02, "seed": seed, "precision": "fp32"}
    spec = {**dataset["spec"], "model": SLOW, "training": settings}
    return {"spec": spec, "dataset": dataset["dataset"], **parameters}


def _result(scene: Scene, run: str) -> Path:
    """The folder of what a training run has made."""
    return Path(json.loads((scene.home / "store" / "runs" / f"{run}.json").read_text())["value"]["path"])


def _weights(scene: Scene, run: str) -> str:
    return hashlib.sha256((_result(scene, run) / "weights.safetensors").read_bytes()).hexdigest()


def _work_on(scene: Scene, node: str) -> list[int]:
    """The processes of runs on a node: engines, trainings, batch programs."""
    found = []
    for pid in scene.cluster.processes(node):
        words = Path(f"/proc/{pid}/cmdline")
        if words.exists() and (b"prefect.engine" in (line := words.read_bytes()) or b"serin." in line):
            found.append(pid)
    return found


def _seconds(clock: str) -> int:
    """Of Slurm's [[hours:]minutes:]seconds."""
    return sum(int(part) * 60**place for place, part in enumerate(reversed(clock.split(":"))))


def _restarts(scene: Scene, run: str) -> int:
    return int((scene.job_of(run) or {"Restarts": "0"})["Restarts"])


def _nothing_left(scene: Scene) -> None:
    wait_until(lambda: not any(_work_on(scene, node) for node in NODES), "no process of a run is left")


def _begun(scene: Scene, run: str) -> dict[str, str]:
    """Waits until the training of a run has begun; returns its job."""
    scene.wait_for(run, "RUNNING", within_s=900)
    scene.wait_in_log(run, BEGUN, within_s=900)
    job = scene.job_of(run)
    assert job is not None
    return job


def _make_qualities(scene: Scene) -> None:
    """As docs/how-to says, with the account of root, who sends the jobs here."""
    if "serin-urgent" not in scene.cluster.command("sacctmgr", "-nP", "show", "qos", "format=name").split():
        for line in documented("bash").splitlines():
            scene.cluster.command(*line.replace("ACCOUNT", "root").split())


def test_a_priority_that_slurm_does_not_know_is_refused_by_name(scene: Scene, tmp_path: Path) -> None:
    """The tests after this one add it to the cluster."""
    spec = {**small_spec(tmp_path / "a"), "priority": "urgent"}
    run = scene.begin("pipeline/placed", {"spec": spec, "serve": False})
    found = scene.wait_for(run, "FAILED", within_s=900)
    message = found["state"]["message"]
    for words in ("Invalid qos specification 'serin-urgent'", "`priority` of the spec", "sacctmgr add qos"):
        assert words in message, message


def test_a_pipeline_runs_as_jobs_on_two_nodes_with_the_priority_of_its_spec(
    scene: Scene, tmp_path: Path
) -> None:
    _make_qualities(scene)
    scene.set_pool("gpu", cores=1, memory_gb=2, gpus=1, options=[f"--nodelist={NODES[1]}"])
    spec = {**small_spec(tmp_path / "a"), "priority": "urgent"}
    run = scene.begin("pipeline/placed", {"spec": spec, "serve": False})
    scene.wait_for(run, "COMPLETED", within_s=1500)
    inside = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}}
    stages = call(scene.api, "POST", "/flow_runs/filter", inside)
    ours = {run, *(stage["id"] for stage in stages)}

    def jobs_of_it() -> list[dict[str, str]]:
        return [job for job in scene.cluster.jobs() if job["JobName"] in ours]

    wait_until(
        lambda: {job["JobState"] for job in jobs_of_it()} == {"COMPLETED"},
        "the jobs end after their runs",
        lambda: scene.cluster.command("squeue", "-t", "all"),
    )
    jobs = {job["JobName"]: job for job in jobs_of_it()}
    nodes = [jobs[stage["id"]]["NodeList"] for stage in sorted(stages, key=lambda stage: stage["start_time"])]
    assert nodes == [NODES[0], NODES[1], NODES[0]]  # etl, train, export
    assert {jobs[stage["id"]]["QOS"] for stage in stages} == {"serin-urgent"}
    assert [job.get("TresPerNode") for job in jobs.values()].count("gres:gpu:1") == 1
    login = scene.variables["PREFECT_API_AUTH_STRING"].partition(":")[2]
    shown = scene.cluster.command("scontrol", "show", "job", "-dd")
    script = scene.cluster.command("scontrol", "write", "batch_script", jobs[run]["JobId"], "-")
    assert login not in shown + script
    for file in (scene.home / "logs" / "slurm").iterdir():
        assert login not in file.read_text()


def test_a_training_at_its_time_limit_is_requeued_and_ends_with_the_same_weights(
    scene: Scene, dataset: dict[str, Any]
) -> None:
    scene.set_pool("gpu", cores=1, memory_gb=2, time_minutes=20)
    parameters = _training(dataset, epochs=40, seed=1)
    limited = scene.begin("train/placed", parameters, time_minutes=20, stop_before_s=110)
    whole = scene.begin("train/placed", {**parameters, "fresh": True, "attempt": "whole"})
    job = _begun(scene, limited)
    minutes = -(-_seconds(scene.cluster.command("squeue", "-h", "-j", job["JobId"], "-o", "%M")) // 60)
    scene.cluster.command("scontrol", "update", f"JobId={job['JobId']}", f"TimeLimit={minutes + 1}")
    wait_until(
        lambda: _restarts(scene, limited) == 1,
        "the job is requeued",
        lambda: scene.log(limited),
        within_s=150,
    )
    scene.cluster.command("scontrol", "update", f"JobId={job['JobId']}", "TimeLimit=20")
    scene.wait_for(limited, "COMPLETED", within_s=1500)
    scene.wait_for(whole, "COMPLETED", within_s=1500)
    assert _restarts(scene, limited) == 1
    assert "resumed at step" in scene.log(limited)
    assert "its time limit came" in json.dumps(
        call(scene.api, "GET", f"/flow_run_states/?flow_run_id={limited}")
    )
    assert [found["JobName"] for found in scene.cluster.jobs()].count(limited) == 1
    assert _weights(scene, limited) == _weights(scene, whole)


def test_an_idle_training_gives_way_to_urgent_work_and_ends_with_the_same_weights(
    scene: Scene, dataset: dict[str, Any]
) -> None:
    _make_qualities(scene)
    scene.set_pool("gpu", cores=1, memory_gb=2, time_minutes=20)

    def begin(node: str, priority: str, *, epochs: int, seed: int, **parameters: Any) -> str:
        asked = _training(dataset, epochs=epochs, seed=seed, **parameters)
        asked["spec"] = {**asked["spec"], "priority": priority}
        own = job_variables("train", load_spec(asked["spec"]))
        return scene.begin("train/placed", asked, **own, options=["--exclusive", f"--nodelist={node}"])

    idle = begin(NODES[1], "idle", epochs=40, seed=9)
    whole = begin(NODES[0], "normal", epochs=40, seed=9, fresh=True, attempt="whole")
    _begun(scene, idle)
    urgent = begin(NODES[1], "urgent", epochs=1, seed=10)
    scene.wait_for(urgent, "COMPLETED", within_s=900)
    first = scene.job_of(urgent)
    assert first is not None
    assert (first["QOS"], (scene.job_of(idle) or {})["QOS"]) == ("serin-urgent", "serin-idle")
    assert _restarts(scene, idle) == 1
    scene.wait_for(idle, "COMPLETED", within_s=1500)
    scene.wait_for(whole, "COMPLETED", within_s=1500)
    assert _restarts(scene, idle) == 1
    assert "resumed at step" in scene.log(idle)
    assert _weights(scene, idle) == _weights(scene, whole)


def test_scancel_is_seen_in_prefect(scene: Scene, dataset: dict[str, Any]) -> None:
    run = scene.begin("train/placed", _training(dataset, epochs=ENDLESS, seed=2))
    job = _begun(scene, run)
    scene.cluster.command("scancel", job["JobId"])
    found = scene.wait_for(run, "CANCELLED")
    assert f"Slurm job {job['JobId']} was cancelled in Slurm" in found["state"]["message"]
    _nothing_left(scene)


def test_cancelling_in_prefect_reaches_the_job(scene: Scene, dataset: dict[str, Any]) -> None:
    run = scene.begin("train/placed", _training(dataset, epochs=ENDLESS, seed=3))
    _begun(scene, run)
    scene.cancel(run)
    scene.wait_for(run, "CANCELLED")
    job = scene.job_of(run)
    assert job is not None
    assert job["JobState"] == "CANCELLED"
    _nothing_left(scene)


def test_a_killed_worker_finds_its_job_again(scene: Scene, dataset: dict[str, Any]) -> None:
    run = scene.begin("train/placed", _training(dataset, epochs=ENDLESS, seed=4))
    _begun(scene, run)
    scene.kill_worker("gpu")
    later = scene.begin("train/placed", _training(dataset, epochs=1, seed=5))
    scene.start_worker("gpu")
    scene.wait_in_log(run, "follows it now", within_s=900)
    scene.wait_for(later, "COMPLETED", within_s=900)
    assert scene.state(run) == "RUNNING"
    scene.cancel(run)
    scene.wait_for(run, "CANCELLED")
    names = [job["JobName"] for job in scene.cluster.jobs()]
    assert names.count(run) == names.count(later) == 1
    _nothing_left(scene)


def test_a_killed_job_crashes_its_run_and_leaves_nothing(scene: Scene, dataset: dict[str, Any]) -> None:
    run = scene.begin("train/placed", _training(dataset, epochs=ENDLESS, seed=6))
    job = _begun(scene, run)
    for pid in _work_on(scene, job["NodeList"]):
        if b"slurm_job" in Path(f"/proc/{pid}/cmdline").read_bytes():
            hit(pid)
    found = scene.wait_for(run, "CRASHED")
    assert f"Slurm job {job['JobId']} failed" in found["state"]["message"]
    _nothing_left(scene)


def test_a_lost_slurmd_costs_one_restart_and_no_second_run(scene: Scene, dataset: dict[str, Any]) -> None:
    """The job still runs on the node whose slurmd was killed; it ends when Slurm has started it on the other."""
    run = scene.begin("train/placed", _training(dataset, epochs=ENDLESS, seed=7))
    job = _begun(scene, run)
    node = job["NodeList"]
    scene.cluster.kill_node(node)
    assert _work_on(scene, node)
    (other,) = set(NODES) - {node}
    wait_until(lambda: (scene.job_of(run) or {}).get("NodeList") == other, "the job is on the other node",
               lambda: scene.log(run), within_s=200)  # fmt: skip
    wait_until(lambda: not _work_on(scene, node), "the first start has ended itself", within_s=120)
    wait_until(lambda: bool(_work_on(scene, other)), "the second start works", within_s=120)
    scene.cluster.start_node(node)
    scene.cluster.command("scancel", job["JobId"])
    scene.wait_for(run, "CANCELLED", within_s=200)
    assert [found["JobName"] for found in scene.cluster.jobs()].count(run) == 1
    _nothing_left(scene)
    scene.cluster.wait_for_nodes(*NODES)


def test_two_nodes_train_together(scene: Scene, dataset: dict[str, Any]) -> None:
    run = scene.begin("train/placed", _training(dataset, epochs=2, seed=8), nodes=2)
    scene.wait_for(run, "COMPLETED", within_s=1500)
    choices = json.loads(_result(scene, run).with_name("choices.json").read_text())
    assert choices["ranks"] == 2
    _nothing_left(scene)
