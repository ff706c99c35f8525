"""Ranks of a training without torchrun: forked from one process that has loaded torch already."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

WAIT_S = 500.0
NOT_WRITABLE = 28
SLOW_TO_LOAD = (
    "serin.training.programs.worker",
    "serin.training.programs.agent",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)


def run_ranks(count: int, work: Callable[..., None], *arguments: object) -> list[int]:
    """Runs `work(*arguments)` in so many processes that torch.distributed can find each other; their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*SLOW_TO_LOAD])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=_rank, args=(rank, count, port, work, arguments), daemon=True)
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(WAIT_S)
        if rank.is_alive():
            rank.kill()
            rank.join()
    return [rank.exitcode or 0 for rank in ranks]


def train_rank(job_json: str, folder: Path, stop_at: int | None, killed_at: int | None = None) -> None:
    """One rank of a training, on the CPU or on a GPU that all share. The last rank alone asks to stop, after so many
    looks, or kills itself with -9 in the middle of a step."""
    from serin.errors import Preempted
    from serin.training.launch.job import TrainingJob
    from serin.training.parallel.ranks import open_world
    from serin.training.programs import worker

    looks = iter(range(10**9 if stop_at is None else stop_at))
    job = TrainingJob.model_validate_json(job_json)
    with open_world(gpu=job.gpu, per_gpu=job.training.processes_per_gpu) as world:
        last = world.rank == world.size - 1
        if last and killed_at is not None:
            _die_in_step(killed_at)
        try:
            worker.train(job, folder, world, lambda: last and next(looks, None) is None)
        except Preempted:
            os._exit(Preempted.exit_code)


def train_with_small_files(job_json: str, folder: Path, largest_bytes: int) -> None:
    """A training on the CPU for which the disk is full as soon as a file grows beyond `largest_bytes`."""
    import resource

    from serin.errors import StoreNotWritable

    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, largest_bytes))
    try:
        train_rank(job_json, folder, None)
    except StoreNotWritable as error:
        os._exit(NOT_WRITABLE if "File too large" in str(error) else 1)


def _die_in_step(number: int) -> None:
    """Before the weights change in the step with this number (from 0, over all epochs)."""
    from serin.training.engine.loop import Loop
    from serin.training.engine.optimizer import Optimizer

    take_step, apply = Loop._take_step, Optimizer.apply

    def take(loop: Loop, rows: object) -> None:
        if loop.step == number:
            Optimizer.apply = lambda _updates: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        take_step(loop, rows)  # type: ignore[arg-type]
        Optimizer.apply = apply  # type: ignore[method-assign]

    Loop._take_step = take  # type: ignore[method-assign]


def train_several(jobs: dict[str, str], folder: Path) -> None:
    """One rank of several trainings, one after the other, each in its folder; on the CPU, or all ranks on one GPU."""
    from serin.training.launch.job import TrainingJob
    from serin.training.parallel.ranks import open_world
    from serin.training.programs import worker

    made = {name: TrainingJob.model_validate_json(job_json) for name, job_json in jobs.items()}
    first = next(iter(made.values()))
    with open_world(gpu=first.gpu, per_gpu=first.training.processes_per_gpu) as world:
        for name, job in made.items():
            (folder / name).mkdir(exist_ok=True)
            worker.train(job, folder / name, world, lambda: False)


def average_gradients(folder: Path, bucket_bytes: int) -> None:
    """One rank of replicas that begin with different weights, some of which a step uses on some ranks only; writes down
    its weights and its gradients, and what is said of one that is used too late."""
    import torch
    from safetensors.torch import save_file

    from serin.training.parallel import gradients
    from serin.training.parallel.parallelize import Parallelized
    from serin.training.parallel.ranks import open_world

    gradients._BUCKET_BYTES = bucket_bytes
    with open_world(gpu=False) as world:
        torch.manual_seed(world.rank)
        names = ("all", "one", "wide", "none", "last")
        network = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in names})
        network["wide"].double()
        network["one"].weight = torch.nn.Parameter(torch.rand(3, 2).t())  # in another order in memory
        mean = Parallelized(network, "ddp", world)._mean
        assert mean is not None
        used = {0: ("all", "one", "wide", "last"), 1: ("all", "wide"), 2: ("all",)}
        for name in used[world.rank]:
            for weight in network[name].parameters():
                weight.grad = torch.full_like(weight, world.rank + 1.0)
        mean()
        weights = dict(network.named_parameters())
        means = {f"{name}.grad": each.grad for name, each in weights.items() if each.grad is not None}
        assert all(weights[name[:-5]].stride() == mean.stride() for name, mean in means.items())
        kept = {name: tensor.detach().contiguous() for name, tensor in {**weights, **means}.items()}
        save_file(kept, folder / f"rank-{world.rank}.safetensors")
        network["none"].bias.grad = torch.ones(2)
        try:
            mean()
        except RuntimeError as error:
            (folder / f"rank-{world.rank}.txt").write_text(str(error))


def meet(settings: dict[str, str], folder: Path) -> None:
    """One rank that meets the others as `settings` say, and writes down at which addresses it listens."""
    import psutil

    from serin.training.parallel.ranks import open_world

    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    os.environ.update(settings)
    with open_world(gpu=False) as world:
        world.wait_for_all()
        found = [
            each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN
        ]
        (folder / f"rank-{world.rank}").write_text(" ".join(each.laddr.ip for each in found))
        world.wait_for_all()


def _rank(rank: int, count: int, port: int, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    work(*arguments)
