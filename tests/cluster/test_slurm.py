"""Pipelines as Slurm jobs on two nodes: a real slurmctld, real slurmds, a real Prefect server and Serin's workers."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serin.prefect.rest_api import call
from tests.cluster.slurm import NODES, running_slurm, wait_until
from tests.cluster.slurm_scene import Scene, slurm_scene
from tests.fakes import slow_network
from tests.fakes.small_pipeline import small_spec, write_spec
from tests.kit.commands import serin_process
from tests.signals import hit

pytestmark = pytest.mark.timeout(3600)  # a busy machine; waits are bounded

ENDLESS = 10**5
SLOW = {"module": f"{Path(slow_network.__file__)}:SlowNet", "options": {"pause_s": 0.05}}
BEGUN = "epoch 1"  # a line of the training


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("slurm")
    with running_slurm(folder / "c") as cluster, slurm_scene(cluster, folder / "home") as made:
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


def test_a_pipeline_runs_as_jobs_on_two_nodes(scene: Scene, tmp_path: Path) -> None:
    scene.set_pool("gpu", cores=1, memory_gb=2, gpus=1, options=[f"--nodelist={NODES[1]}"])
    run = scene.begin("pipeline/placed", {"spec": small_spec(tmp_path / "a"), "serve": False})
    scene.wait_for(run, "COMPLETED", within_s=1500)
    inside = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}}
    stages = call(scene.api, "POST", "/flow_runs/filter", inside)
    wait_until(
        lambda: {job["JobState"] for job in scene.cluster.jobs()} == {"COMPLETED"},
        "the jobs end after their runs",
        lambda: scene.cluster.command("squeue", "-t", "all"),
    )
    jobs = {job["JobName"]: job for job in scene.cluster.jobs()}
    nodes = [jobs[stage["id"]]["NodeList"] for stage in sorted(stages, key=lambda stage: stage["start_time"])]
    assert nodes == [NODES[0], NODES[1], NODES[0]]  # etl, train, export
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
