"""Resolves the `auto` settings of a run from the spec, the hardware and short measurements; a resumed run keeps
them.

For the rows per step auto takes the smallest step whose rows per second are within 5% of the fastest measured: more
rows would only mean fewer updates. An epoch keeps some two hundred steps, enough to learn from a small table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import nn

from serin.errors import TrainingRefused
from serin.machine.durable import write_whole
from serin.machine.hardware import core_count
from serin.models.table import Divisible
from serin.spec.training import Strategy, TrainingSpec
from serin.training.data.tables import Batch, MappedTable, ResidentTable
from serin.training.engine.learner import Learner
from serin.training.engine.optimizer import by_row_pays, category_tables
from serin.training.engine.precision import candidates, refuse_precision
from serin.training.engine.step import CapturedStep, seconds_per_step
from serin.training.engine.tuning.step_autotune import undone
from serin.training.launch.job import ResolvedSettings, TrainingJob, choices_file
from serin.training.parallel.ranks import Ranks

_OPTIMIZER_NUMBERS = {"adamw": 2, "sgd": 1, "adagrad": 1}  # per weight, beside the weight and its gradient
_MEASURED_S = 0.1
_FOR_STATE = 0.5  # of a device's memory; the rest is for rows and activations
_STEPS_PER_EPOCH = 200
_SMALLEST = 256
_LARGEST = {"cpu": 8192, "cuda": 65536}  # per rank
_NEAR_THE_PEAK = 0.95
_RATE_IS_FOR = 1024  # rows
_LARGEST_FACTOR = 4.0
_PRODUCTS_PER_THREAD = 10_000_000
_BUDGET_S = 1.5  # for all measurements together
_BATCH_LIMIT = "batch_limit"  # a file in the run's folder
Device = Literal["cpu", "cuda"]


def read_choices(folder: Path) -> ResolvedSettings | None:
    file = choices_file(folder)
    return ResolvedSettings.model_validate_json(file.read_bytes()) if file.exists() else None


def first_choices(
    job: TrainingJob, folder: Path, world: Ranks, network: nn.Module, rows: int, kept: ResolvedSettings | None
) -> ResolvedSettings:
    """Resolves the strategy and the largest candidate batch, which are enough to build a learner.

    `kept`: the choices of an earlier attempt, which are kept as far as this hardware allows.
    """
    training, device = job.training, _device(world)
    refused = refuse_precision(training.precision, world.device)
    if refused:
        raise TrainingRefused(folder=folder, reason=refused)
    possible = candidate_batch_rows(training.batch_rows, rows=rows, ranks=world.size, device=device)
    by_row = kept.by_row if kept else _by_row(training, network, max(possible, default=1))
    try:
        strategy, why = _strategy(training, network, world, by_row=by_row, kept=kept)
    except ValueError as error:
        raise TrainingRefused(folder=folder, reason=str(error)) from error
    shares = world.size if strategy in ("ddp", "fsdp") else 1
    if kept:
        where: dict[str, object] = {"strategy": strategy, "strategy_reason": why, "ranks": world.size}
        return _taken_up(kept, training, world, folder, shares).model_copy(update=where)
    sizes = _sizes(job, world, rows, shares, folder)
    if not sizes:
        reason = f"{rows} training rows do not fill {shares} process(es)"
        raise TrainingRefused(folder=folder, reason=reason)
    return ResolvedSettings(
        batch_rows=sizes[-1],
        steps_per_epoch=rows // sizes[-1],
        precision=_precision(training, world),
        precision_reason="" if training.precision == "auto" else "asked for",
        threads=choose_threads(products_of(network)(sizes[-1] // shares), cores=_cores(world)),
        device=device,
        torch=torch.__version__,
        ranks=world.size,
        strategy=strategy,
        strategy_reason=why,
        by_row=by_row,
        parts=training.gradient_accumulation,
    )


def _taken_up(
    kept: ResolvedSettings, training: TrainingSpec, world: Ranks, folder: Path, shares: int
) -> ResolvedSettings:
    """Returns the choices of an earlier attempt adapted to this one. The rows per step stay the same."""
    if kept.batch_rows % shares:
        counts = [count for count in range(1, 65) if kept.batch_rows % count == 0]
        reason = (
            f"the run has {kept.batch_rows} rows per step, which do not divide over {world.size} processes; "
            f"these do: {', '.join(map(str, counts))}"
        )
        raise TrainingRefused(folder=folder, reason=reason)
    if kept.device == _device(world):
        return kept
    fresh = {"device": _device(world), "precision": _precision(training, world), "execution": "auto"}
    return kept.model_copy(update=fresh)  # measurements of other hardware do not apply here


def final_choices(
    job: TrainingJob,
    folder: Path,
    choices: ResolvedSettings,
    learner: Learner,
    table: ResidentTable | MappedTable,
    products: Callable[[int], int],
) -> ResolvedSettings:
    """Measures the batch and resolves the settings that depend on it. The first rank stores the result."""
    world, training = learner.world, job.training
    shares = learner.spread.rows.size
    sizes = _sizes(job, world, table.rows, shares, folder)
    cores = _cores(world)
    with undone(learner):
        batch_rows, why = measure_batch_rows(
            sizes, lambda size: _seconds(learner, table, size, folder, cores, products)
        )
    rate = scaled_rate(
        training.learning_rate, batch_rows, optimizer=training.optimizer, chosen=training.batch_rows == "auto"
    )
    made = choices.model_copy(
        update={
            "batch_rows": batch_rows,
            "batch_reason": why if training.batch_rows == "auto" else "asked for",
            "steps_per_epoch": table.rows // batch_rows,
            "learning_rate": rate,
            "threads": choose_threads(products(batch_rows // shares), cores=cores),
        }
    )
    if world.first:
        write_choices(folder, made)
    return made


def write_choices(folder: Path, choices: ResolvedSettings) -> None:
    write_whole(choices_file(folder), choices.model_dump_json(indent=1) + "\n")


def products_of(network: nn.Module) -> Callable[[int], int]:
    """Estimates the multiplications of a step of so many rows: forward, and twice that backward."""
    linear = sum(layer.weight.numel() for layer in network.modules() if isinstance(layer, nn.Linear))
    return lambda rows: 3 * rows * linear


def _seconds(
    learner: Learner,
    table: ResidentTable | MappedTable,
    size: int,
    folder: Path,
    cores: int,
    products: Callable[[int], int],
) -> float | None:
    """Returns seconds per step of `size` rows over all ranks; None when it does not fit.

    With several ranks that ends the attempt, because the others may be waiting for this one inside a step.
    """
    world, rows = learner.world, size // learner.spread.rows.size
    torch.set_num_threads(choose_threads(products(rows), cores=cores))
    try:
        batch = table.slice(0, rows)
        run = _captured(learner, batch) if world.device.type == "cuda" and learner.may_capture else None
        return seconds_per_step(lambda: (run or learner.step)(batch), world, within_s=_MEASURED_S)
    except torch.OutOfMemoryError as error:
        learner.updates.clear()
        if world.size > 1:
            limit_batch(folder, size)
            raise StartAgain(f"out of memory with {size:,} rows per step: trying fewer") from error
        torch.cuda.empty_cache()
        return None


def _captured(learner: Learner, batch: Batch) -> CapturedStep | None:
    """Captures a step; None when a CUDA graph cannot hold it, for which ready_step() gives the reason."""
    try:
        return CapturedStep(learner.step, batch)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize(learner.world.device)
        torch.cuda.empty_cache()
        return None


def _sizes(job: TrainingJob, world: Ranks, rows: int, shares: int, folder: Path) -> list[int]:
    return candidate_batch_rows(
        job.training.batch_rows, rows=rows, ranks=shares, device=_device(world), limit=batch_limit(folder)
    )


def _precision(training: TrainingSpec, world: Ranks) -> Literal["auto", "fp32", "tf32", "bf16", "fp16"]:
    """Returns the precision, or auto where there is something to measure."""
    return (
        "fp32" if training.precision == "auto" and len(candidates(world.device)) == 1 else training.precision
    )


def _strategy(
    training: TrainingSpec, network: nn.Module, world: Ranks, *, by_row: bool, kept: ResolvedSettings | None
) -> tuple[Strategy, str]:
    if kept and training.strategy == "auto" and kept.ranks == world.size:
        return kept.strategy, kept.strategy_reason
    numbers = {name: weight.numel() for name, weight in network.named_parameters()}
    each = 4 * (2 + _OPTIMIZER_NUMBERS[training.optimizer])
    memory = psutil.virtual_memory().total // world.size
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory // world.device_ranks
    weight = TrainingMemory(
        state=each * sum(numbers.values()),
        largest=4 * max(numbers.values(), default=0),
        device=memory,
        ranks=world.size,
        cuts=isinstance(network, Divisible) and bool(network.cuts(world.size)),
    )
    return choose_strategy(training.strategy, weight, by_row=by_row)


def _by_row(training: TrainingSpec, network: nn.Module, batch_rows: int) -> bool:
    """Returns whether category tables are large enough for row-wise updates, which need whole tables on every rank."""
    if training.strategy not in ("auto", "ddp"):
        return False
    if training.embedding_updates != "auto":
        return training.embedding_updates == "sparse"
    return any(
        by_row_pays(len(table.weight), batch_rows * len(table.offsets)) for table in category_tables(network)
    )


def _cores(world: Ranks) -> int:
    return max(1, core_count() // world.local_size)


def _device(world: Ranks) -> Literal["cpu", "cuda"]:
    return "cuda" if world.device.type == "cuda" else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """The memory needs of a training in bytes, and how it could be divided."""

    state: int  # weights, gradients and the optimizer's state
    largest: int  # the weights of the largest part that FSDP must gather: a table or a layer
    device: int  # memory of one rank's device
    ranks: int
    cuts: bool  # its layers can be split


def choose_strategy(
    wanted: Literal["auto"] | Strategy, weight: TrainingMemory, *, by_row: bool = False
) -> tuple[Strategy, str]:
    """Returns (strategy, reason). Raises ValueError, with the reason, for one that is impossible.

    `by_row`: large tables are updated row by row, which only replicas (`ddp`) support, whose ranks have whole tables.
    """
    if weight.ranks == 1:
        return "ddp", "one process"
    if wanted != "auto":
        reason = _unfit(wanted, weight, by_row=by_row)
        if reason:
            raise ValueError(f"training.strategy={wanted}: {reason}")
        return wanted, "asked for"
    room = int(weight.device * _FOR_STATE)
    size = f"{_gb(weight.state)} of weights, gradients and optimizer"
    if by_row or weight.state <= room:
        return "ddp", f"{size} fit into {_gb(room)} on every device"
    if weight.state // weight.ranks + 2 * weight.largest <= room:
        return "fsdp", f"{size} do not fit into {_gb(room)}, but do when sharded over {weight.ranks}"
    if not _unfit("tensor", weight, by_row=by_row):
        return (
            "tensor",
            f"{size}, with {_gb(weight.largest)} in one part, are too large to be gathered on a device",
        )
    return "fsdp", f"{size} may not fit, and the network can only be sharded"


def _unfit(wanted: Strategy, weight: TrainingMemory, *, by_row: bool) -> str:
    if by_row and wanted != "ddp":
        return "tables that are updated row by row must be whole on every rank; set embedding_updates: dense"
    if wanted == "tensor" and not weight.cuts:
        return "this network's layers cannot be split for tensor parallelism; use mlp, dcn, ft_transformer or fsdp"
    return ""


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def choose_threads(products: int, *, cores: int) -> int:
    """Returns the threads for a step of so many multiplications: a small step ends before a second thread has
    started."""
    return max(1, min(cores, products // _PRODUCTS_PER_THREAD))


def candidate_batch_rows(
    wanted: int | Literal["auto"], *, rows: int, ranks: int, device: Device, limit: int | None = None
) -> list[int]:
    """Returns the rows per step (all ranks together) to measure, smallest first: multiples of `ranks`, at most `rows`.

    Just one when there is nothing to choose, none when the rows do not fill the ranks. Powers of two, up to the one
    that gives an epoch some two hundred steps, within what a device handles well. `limit`: a size known not to fit.
    """
    if wanted != "auto":
        sizes = [wanted]
    else:
        power = 1 << max(0, (rows // _STEPS_PER_EPOCH).bit_length() - 1)
        most = min(max(power, _SMALLEST), _LARGEST[device] * ranks)
        sizes = [_SMALLEST << doubled for doubled in range((most // _SMALLEST).bit_length())]
        sizes = [size for size in sizes if limit is None or size < limit] or [_SMALLEST]
    whole = (
        min(-(-size // ranks) * ranks if wanted == "auto" else size, rows) // ranks * ranks for size in sizes
    )
    return sorted({size for size in whole if size})


def choose_batch_rows(rows_per_s: Mapping[int, float]) -> tuple[int, str]:
    """Returns the smallest size within 5% of the fastest, and the reason. Pure."""
    peak = max(rows_per_s.values())
    chosen = min(size for size, rate in rows_per_s.items() if rate >= _NEAR_THE_PEAK * peak)
    measured = ", ".join(f"{size:,}: {rate:,.0f}" for size, rate in rows_per_s.items())
    return chosen, f"rows/s by rows per step: {measured}"


def measure_batch_rows(
    sizes: list[int], seconds: Callable[[int], float | None], *, budget_s: float = _BUDGET_S
) -> tuple[int, str]:
    """Times a step of each size with `seconds`, which returns None for one that does not fit; (the chosen size, the
    reason).

    Stops where the next size would exceed the budget or does not fit. All ranks stop at the same size, since they get
    the same seconds.
    """
    if len(sizes) == 1:
        return sizes[0], "nothing to choose"
    rates: dict[int, float] = {}
    spent = 0.0
    for size in sizes:
        found = seconds(size)
        if found is None:
            break
        rates[size] = size / found
        spent += found
        if spent + 3 * found > budget_s:
            break
    return (
        choose_batch_rows(rates) if rates else (sizes[0], "no size fits at once; it will be split into parts")
    )


def scaled_rate(rate: float, batch_rows: int, *, optimizer: str, chosen: bool) -> float:
    """Returns the peak learning rate for a step of so many rows. Pure.

    A rate belongs to the rows per step given beside it in the spec. Where those are chosen here, it is meant for 1,024
    rows; with more rows it grows by the square root of the ratio (for SGD by the ratio), at most four times. Fewer rows
    leave it unchanged.
    """
    if not chosen or batch_rows <= _RATE_IS_FOR:
        return rate
    times = batch_rows / _RATE_IS_FOR
    return rate * min(_LARGEST_FACTOR, times if optimizer == "sgd" else times**0.5)


# A single process continues by itself. With several, the others wait inside a step for one that cannot continue: the
# new setting is stored, all exit, and the launcher restarts them from the last checkpoint.
class StartAgain(Exception):
    """Raised to restart all ranks; the changed settings are already in the run's folder."""


def smaller_parts(parts: int, rows: int) -> int | None:
    """Returns into how many parts `rows` are split next; None when they cannot be. Pure."""
    twice = 2 * parts
    return twice if rows % twice == 0 else None


def limit_batch(folder: Path, batch_rows: int) -> None:
    """Stores for the next measurement that so many rows did not fit."""
    write_whole(folder / _BATCH_LIMIT, f"{batch_rows}\n")


def batch_limit(folder: Path) -> int | None:
    try:
        return int((folder / _BATCH_LIMIT).read_text())
    except FileNotFoundError:
        return None
