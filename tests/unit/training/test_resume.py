"""Interrupted in every way, a training ends with the same weights, bit for bit: real processes, signals and torchrun.

A start of torchrun costs seconds, so each of those tests tells a long story; kills at random steps go through processes
that are forked with torch loaded. The precision is named: `auto` times the steps, and on a busy machine with bf16 two
runs may get different ones.
"""

import json
import os
import random
import signal
import socket
import threading
from pathlib import Path

import pytest

from serin.errors import Preempted, SpecError, WorkerFailed
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.launch import launcher
from serin.training.launch.machines import Machines
from serin.training.programs.agent import _meet_in_a_file
from serin.training.results.checkpoint import Checkpoints
from tests.fakes.datasets import make_dataset
from tests.logs import heard
from tests.signals import hit
from tests.unit.training.ranks import NOT_WRITABLE, meet, run_ranks, train_rank, train_with_small_files
from tests.unit.training.runs import (
    MODEL,
    ask_this_process_to_stop,
    assert_same_bits,
    at_the_next_checkpoint,
    job_of,
    made,
    records,
    seldom_saved,
    train_here,
)
from tests.unit.training.warm import warm  # noqa: F401 (a fixture)

HUNGRY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, numeric, sizes, outputs, limit):
        super().__init__()
        self.layers, self.limit = nn.Sequential(nn.Linear(numeric, 16), nn.ReLU(), nn.Linear(16, outputs)), limit

    def forward(self, num, cat):
        if self.training and len(num) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layers(num)
"""


def often_saved(**settings: object) -> TrainingSpec:
    return TrainingSpec(**{"batch_rows": 50, "learning_rate": 3e-3, "precision": "fp32", **settings})


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_three_random_steps_it_ends_with_the_same_weights(tmp_path: Path, ranks: int) -> None:
    """One rank, the last, is killed with -9 in the middle of a step; the others end by themselves."""
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 1000, "valid": 200, "test": 200})
    training = often_saved(epochs=3, checkpoint_every_steps=4, processes=ranks)
    job = job_of(MODEL, training, dataset).model_dump_json()
    steps = sorted(random.SystemRandom().sample(range(5, 60), 3))
    print("killed at steps", steps)
    folder = made(tmp_path / "run")
    for step in steps:
        ended = run_ranks(ranks, train_rank, job, folder, None, step)
        assert ended[-1] == -signal.SIGKILL
        assert 0 not in ended
    assert run_ranks(ranks, train_rank, job, folder, None) == [0] * ranks
    reference = job_of(MODEL, seldom_saved(training), dataset).model_dump_json()
    assert run_ranks(ranks, train_rank, reference, made(tmp_path / "reference"), None) == [0] * ranks
    resumed_at = [record["step"] for record in records(folder, "started")]
    print("resumed at steps", resumed_at)
    assert all(at <= step for at, step in zip(resumed_at[1:], steps, strict=True))
    assert resumed_at[-1] > 0
    assert_same_bits(folder, tmp_path / "reference")


def test_one_process_that_was_asked_to_stop_and_then_killed_ends_with_the_same_weights(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """SIGTERM to the launcher, then kill -9 of its worker, then left alone."""
    dataset, folder, reference = make_dataset(tmp_path / "dataset"), tmp_path / "run", tmp_path / "reference"
    training = often_saved(epochs=8, checkpoint_every_steps=20)
    with pytest.raises(Preempted) as stopped, at_the_next_checkpoint(folder, ask_this_process_to_stop):
        launcher.train(MODEL, training, dataset, folder=folder)
    request.getfixturevalue("warm")  # the first was started as every worker is
    with pytest.raises(WorkerFailed, match="SIGKILL"), at_the_next_checkpoint(folder, hit):
        launcher.train(MODEL, training, dataset, folder=folder)
    launcher.train(MODEL, training, dataset, folder=folder)
    train_here(MODEL, seldom_saved(training), dataset, reference)

    resumed_at = [record["step"] for record in records(folder, "started")]
    assert stopped.value.fields["step"] == resumed_at[1] < resumed_at[2]  # SIGTERM lost nothing
    assert_same_bits(folder, reference)
    receipt = json.loads((folder / "receipt.json").read_text())
    assert receipt["rows"] == 8 * 4000 - resumed_at[2] * 50
    assert receipt["rows_per_s"] > 0


def test_a_disk_that_fills_up_while_saving_leaves_the_last_checkpoint_and_the_run_resumes(
    tmp_path: Path,
) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 1000, "valid": 200, "test": 200})
    training = often_saved(epochs=2, checkpoint_every_steps=4)
    job, folder = job_of(MODEL, training, dataset).model_dump_json(), made(tmp_path / "run")
    assert run_ranks(1, train_rank, job, folder, 9) == [Preempted.exit_code]
    last = Checkpoints(folder).newest(pytest.fail)
    assert last is not None
    assert run_ranks(1, train_with_small_files, job, folder, 32_000) == [NOT_WRITABLE]
    assert list((folder / "checkpoints").glob(".*"))  # half a checkpoint, which does not count
    after = Checkpoints(folder).newest(pytest.fail)
    assert after.position == last.position
    assert run_ranks(1, train_rank, job, folder, None) == [0]
    train_here(MODEL, seldom_saved(training), dataset, tmp_path / "reference")
    assert_same_bits(folder, tmp_path / "reference")
    assert not list((folder / "checkpoints").glob(".*"))


def test_ranks_of_one_machine_meet_without_a_port_that_others_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "SERIN_RANKS_MEET",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    )
    for name in names:
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    options = _meet_in_a_file(tmp_path, own=True)
    assert "store_type=file" in options
    assert Path(options[options.index("--rdzv-endpoint") + 1]).parent.stat().st_mode & 0o777 == 0o700
    settings = {name: os.environ[name] for name in names}
    assert run_ranks(2, meet, settings, tmp_path) == [0, 0]
    for rank in range(2):
        assert set((tmp_path / f"rank-{rank}").read_text().split()) == {"127.0.0.1"}


@pytest.mark.usefixtures("warm")
def test_two_processes_without_enough_memory_are_started_again_with_smaller_parts(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 1000, "valid": 200, "test": 200})
    (tmp_path / "net.py").write_text(HUNGRY)
    folder, reference = tmp_path / "run", made(tmp_path / "reference")
    said: list[str] = []
    hungry = {"precision": "fp32", "epochs": 2, "batch_rows": 100, "processes": 2}
    model = ModelSpec(module=f"{tmp_path / 'net.py'}:Net", options={"limit": 25})
    with heard(said.append):
        launcher.train(model, TrainingSpec(**hungry), dataset, folder=folder)
    frugal = job_of(model, TrainingSpec(**hungry, gradient_accumulation=2), dataset).model_dump_json()
    assert run_ranks(2, train_rank, frugal, reference, None) == [0, 0]
    assert any("out of memory: 25 rows at a time from now on, still 100 per step" in line for line in said)
    assert sum("2 processes" in line for line in said) == 2
    assert_same_bits(folder, reference)


@pytest.mark.usefixtures("warm")
def test_two_machines_meet_and_end_with_the_same_weights_when_one_loses_its_worker(tmp_path: Path) -> None:
    """Two launchers on this host. The first rank is killed with -9, both fail; started again, both go on."""
    dataset, folder = make_dataset(tmp_path / "dataset"), tmp_path / "run"
    reference = made(tmp_path / "reference")
    training = often_saved(epochs=4, checkpoint_every_steps=20)

    def on_two_machines() -> list[object]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            machines = Machines(count=2, rendezvous=f"127.0.0.1:{free.getsockname()[1]}")
        ended: list[object] = []

        def launch() -> None:
            try:
                ended.append(launcher.train(MODEL, training, dataset, folder=folder, machines=machines))
            except WorkerFailed as error:
                ended.append(error)

        threads = [threading.Thread(target=launch) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ended

    with at_the_next_checkpoint(folder, hit):
        failed = on_two_machines()
    assert [type(error) for error in failed] == [WorkerFailed] * 2
    done = on_two_machines()
    assert done[0] == done[1]
    assert not isinstance(done[0], WorkerFailed)
    job = job_of(MODEL, TrainingSpec(**{**seldom_saved(training).model_dump(), "processes": 2}), dataset)
    assert run_ranks(2, train_rank, job.model_dump_json(), reference, None) == [0, 0]
    started = records(folder, "started")
    assert [record["ranks"] for record in started] == [2, 2]
    assert started[0]["step"] == 0 < started[1]["step"]
    assert_same_bits(folder, reference)


def test_three_ranks_that_were_stopped_end_with_the_same_weights(tmp_path: Path) -> None:
    """With more than two, the order in which gradients are added has an effect."""
    dataset = make_dataset(tmp_path / "dataset")
    training = often_saved(epochs=3, batch_rows=60, processes=3)
    job = job_of(MODEL, training, dataset).model_dump_json()
    stopped, whole = made(tmp_path / "stopped"), made(tmp_path / "whole")
    assert run_ranks(3, train_rank, job, stopped, 3) == [Preempted.exit_code] * 3
    assert run_ranks(3, train_rank, job, stopped, None) == [0, 0, 0]
    assert run_ranks(3, train_rank, job, whole, None) == [0, 0, 0]
    assert_same_bits(stopped, whole)


@pytest.mark.parametrize(
    ("count", "rendezvous", "reason"),
    [
        (2, None, "2 machines need a store that all of them use"),
        (2, "nowhere", "is not host:port"),
        (0, None, "use at least 1"),
    ],
)
def test_machines_that_cannot_meet_are_refused(count: int, rendezvous: str | None, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        Machines(count=count, rendezvous=rendezvous)


@pytest.mark.parametrize(
    "model", [MODEL, ModelSpec(hidden=(8,), dropout=0.1, ensemble_size=3)], ids=["one", "ensemble"]
)
def test_one_rank_stopped_again_and_again_ends_with_the_same_weights(
    tmp_path: Path, model: ModelSpec
) -> None:
    dataset, training = make_dataset(tmp_path / "dataset"), often_saved(epochs=3)
    stops = 0
    while True:
        calls = iter(range(70))
        try:
            train_here(
                model, training, dataset, tmp_path / "run", lambda left=calls: next(left, None) is None
            )
            break
        except Preempted:
            stops += 1
    train_here(model, training, dataset, tmp_path / "reference")
    assert stops >= 2
    assert_same_bits(tmp_path / "run", tmp_path / "reference")
