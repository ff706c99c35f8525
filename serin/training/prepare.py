"""Which kind of step a run gets: measured once when it begins, recorded, the same again when it is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from serin.training.full import fill, full
from serin.training.loader import Loader
from serin.training.step import CapturedStep, Step, capture_pays, seconds_per_step
from serin.training.stream import StreamLoader
from serin.training.tables import Batch
from serin.training.updates import Updates
from serin.training.world import World

Kind = Literal["eager", "captured", "compiled"]
Feed = Callable[[int, int], Iterator[Tensor | Batch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A step and what feeds it: batches, or row numbers for one that gathers them itself."""

    run: Callable[[Tensor | Batch], Tensor]
    feed: Feed
    kind: Kind
    reason: str


def ready_step(
    step: Step,
    loader: Loader | StreamLoader,
    wanted: Literal["auto"] | Kind,
    *,
    network: nn.Module,
    world: World,
) -> Ready:
    """The step as wanted; eager, with the reason, where that cannot be. Leaves weights and randomness as they were.

    `auto` captures on one GPU when that is faster there. It never compiles: that takes longer than most runs here last.
    """
    match wanted:
        case "eager":
            return _eager(step, loader, "asked for")
        case "compiled":
            with _undone(network, step.updates, world):
                return _compiled(step, loader)
        case "auto" | "captured":
            if world.device.type != "cuda":
                return _eager(step, loader, "only a GPU can capture a step")
            if world.size > 1:
                return _eager(step, loader, "a step that talks to other processes is not captured")
            with _undone(network, step.updates, world):
                return _captured(step, loader, world, sure=wanted == "captured")


def _eager(step: Step, loader: Loader | StreamLoader, reason: str) -> Ready:
    return Ready(run=step, feed=loader.batches, kind="eager", reason=reason)


def _captured(step: Step, loader: Loader | StreamLoader, world: World, *, sure: bool) -> Ready:
    feed: Feed = loader.row_numbers if isinstance(loader, Loader) else loader.batches
    example: Tensor | Batch = next(iter(feed(0, 1)))
    try:
        captured = CapturedStep(step, example)
    except RuntimeError as error:  # what torch raises for whatever a graph cannot hold
        torch.cuda.synchronize(world.device)
        return _eager(step, loader, f"cannot be captured: {_first_line(error)}")
    if sure:
        return Ready(run=captured, feed=feed, kind="captured", reason="asked for")
    captured_s = seconds_per_step(lambda: captured(example), world.device)
    eager_s = seconds_per_step(lambda: step(example), world.device)
    reason = f"captured {captured_s * 1e3:.3f} ms, eager {eager_s * 1e3:.3f} ms per step"
    if not capture_pays(eager_s, captured_s):
        return _eager(step, loader, reason)
    return Ready(run=captured, feed=feed, kind="captured", reason=reason)


def _compiled(step: Step, loader: Loader | StreamLoader) -> Ready:
    try:
        compiled = step.compiled()
        compiled(next(loader.batches(0, 1)))
    except RuntimeError as error:  # no compiler, or a network that cannot be traced
        return _eager(step, loader, f"cannot be compiled: {_first_line(error)}")
    return Ready(run=compiled, feed=loader.batches, kind="compiled", reason="asked for")


@contextmanager
def _undone(network: nn.Module, updates: Updates, world: World) -> Iterator[None]:
    """What is tried in the block changes nothing."""
    before = {name: full(tensor).clone() for name, tensor in network.state_dict().items()}
    random, random_gpu = torch.get_rng_state(), None
    if world.device.type == "cuda":
        random_gpu = torch.cuda.get_rng_state(world.device)
    try:
        yield
    finally:
        for name, tensor in network.state_dict().items():
            fill(tensor, before[name])
        updates.clear()
        updates.forget()
        torch.set_rng_state(random)
        if random_gpu is not None:
            torch.cuda.set_rng_state(random_gpu, world.device)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
