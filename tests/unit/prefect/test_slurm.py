"""What becomes of a run by its Slurm job, what is asked of sbatch, and which start of a job has the run."""

from pathlib import Path

import psutil
import pytest

from deployments.workers.slurm.commands import parse_jobs
from deployments.workers.slurm.configuration import SlurmConfiguration
from deployments.workers.slurm.job_states import Fate, Job, fate_of, newest
from serin.etl.engines.memory_budget import available_bytes
from serin.machine.hardware import core_count
from serin.prefect.slurm_job import Start

RUN = "0d9f1f6e-6a3c-4f2f-9a55-1c2b3d4e5f60"


@pytest.mark.parametrize(
    ("job", "run", "fate"),
    [
        ("COMPLETED", "COMPLETED", Fate.LEAVE),
        ("COMPLETED", "RUNNING", Fate.CRASHED),  # it exited without a word
        ("FAILED", "FAILED", Fate.LEAVE),
        ("FAILED", "RUNNING", Fate.CRASHED),
        ("CANCELLED", "RUNNING", Fate.CANCELLED),  # scancel
        ("CANCELLED", "CRASHED", Fate.CANCELLED),  # its process reported SIGTERM before
        ("CANCELLED", "PENDING", Fate.CANCELLED),
        ("CANCELLED", "COMPLETED", Fate.LEAVE),
        ("FAILED", "CANCELLING", Fate.CANCELLED),
        ("TIMEOUT", "RUNNING", Fate.CRASHED),
        ("NODE_FAIL", "PENDING", Fate.CRASHED),
        ("FAILED", "SCHEDULED", Fate.LEAVE),  # queued again
        ("COMPLETED", "PAUSED", Fate.LEAVE),
        (None, "RUNNING", Fate.CRASHED),
        (None, "CANCELLING", Fate.CANCELLED),
        (None, "CRASHED", Fate.LEAVE),
    ],
)
def test_the_end_of_a_job_decides_its_run(job: str | None, run: str, fate: Fate) -> None:
    ended = None if job is None else Job(id=7, name=RUN, state=job)
    assert ended is None or ended.ended
    assert fate_of(ended, run) is fate


def test_of_several_jobs_of_a_run_the_one_that_has_not_ended_counts() -> None:
    jobs = parse_jobs(
        f"3|{RUN}|FAILED|0|None|n1|\n4|{RUN}|PENDING|2|Resources||\n5|{RUN}|CANCELLED|0|None||\n6_1|x|RUNNING|0|None||\n"
    )
    assert [job.id for job in jobs] == [3, 4, 5]
    found = newest(jobs)
    assert (found.id, found.restarts, found.waits) == (4, 2, True)
    assert str(found) == "Slurm job 4 waits (Resources, started 2 times before)"
    assert newest([]) is None


def test_what_a_stage_needs_becomes_options_of_sbatch() -> None:
    pool = SlurmConfiguration(
        partition="gpu", gpus=1, gpu_type="h200", cores=8, memory_gb=16, nodes=2, time_minutes=90
    )
    options = set(pool.sbatch_options(run=RUN, flow="train", home=Path("/shared/100%")))
    assert options >= {
        "--requeue", "--dependency=singleton", "--gres=gpu:h200:1", "--cpus-per-task=8", "--mem=16000M", "--nodes=2",
        "--time=90", "--partition=gpu", "--signal=B:USR1@120", "--output=/shared/100%%/logs/slurm/%x-%j.log",
    }  # fmt: skip
    assert not any(option.startswith("--account") for option in options)
    assert "--nodes=1" in pool.sbatch_options(run=RUN, flow="etl", home=Path("/shared"))


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"gpus": 1, "processes": 4, "cores": 2}, (4, 4, None)),
        ({"gpus": 0, "processes": 4, "cores": 2}, (0, 4, None)),  # ranks on cores
        ({"memory_gb": 4, "data_gb": 10}, (0, 2, 4)),  # the pool allows no more
        ({"memory_gb": 4, "most_memory_gb": 100, "data_gb": 10}, (0, 2, 61)),
        ({"memory_gb": 4, "most_memory_gb": 32, "data_gb": 10}, (0, 2, 32)),
        ({"memory_gb": 4, "most_memory_gb": 32, "data_gb": 0.1}, (0, 2, 4)),
    ],
)
def test_shares_follow_the_spec_and_the_data(
    settings: dict[str, float], shares: tuple[int, int, float | None]
) -> None:
    assert SlurmConfiguration.model_validate(settings).shares() == shares


def test_a_time_limit_must_leave_time_to_work() -> None:
    with pytest.raises(ValueError, match="stop_before_s=60 leaves no time to work within time_minutes=1"):
        SlurmConfiguration(time_minutes=1, stop_before_s=60)


def test_credentials_are_in_the_job_s_environment_and_nowhere_else() -> None:
    pool = SlurmConfiguration(
        env={"PREFECT_API_AUTH_STRING": "serin:hush-hush"}, setup=["module load cuda"], python="/opt/py thon"
    )
    own = {
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "3",
        "SERIN_STACK": "/x",
        "AWS_SECRET_ACCESS_KEY": "deep",
    }
    given = pool.job_environment(own, home=Path("/shared"))
    assert given == {
        "SLURM_CONF": "/etc/slurm.conf", "AWS_SECRET_ACCESS_KEY": "deep", "SERIN_HOME": "/shared",
        "PREFECT_API_AUTH_STRING": "serin:hush-hush", "SERIN_SCHEDULER": "slurm",
    }  # fmt: skip
    script = pool.script()
    assert script.splitlines() == [
        "#!/bin/bash",
        "module load cuda",
        "exec '/opt/py thon' -m serin.prefect.slurm_job",
    ]
    visible = script + " ".join(pool.sbatch_options(run=RUN, flow="train", home=Path("/shared")))
    assert "hush" not in visible
    assert "deep" not in visible


@pytest.mark.parametrize(
    ("mark", "replaced"),
    [
        (None, False),
        ("12", False),
        ("12.0", False),
        ("12.1", False),
        ("12.2", True),
        ("13", True),
        ("11.9", False),
        ("x", False),
    ],
)
def test_a_start_that_slurm_has_replaced_knows_it(mark: str | None, replaced: bool) -> None:
    start = Start(run=RUN, job=12, restarts=1, nodes=1, node="n1")
    assert start.is_replaced_by(mark) is replaced


def test_a_job_uses_the_cores_and_the_memory_that_slurm_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, used_mb = available_bytes(), psutil.Process().memory_info().rss >> 20
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(used_mb + 1000))
    assert core_count() == 1
    assert 0 < available_bytes() < 1001 << 20 < whole
    monkeypatch.delenv("SLURM_MEM_PER_NODE")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", str(used_mb + 500))
    assert 0 < available_bytes() < 501 << 20
