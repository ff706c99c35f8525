"""Chooses the execution and precision of a run's steps: measured once when it begins, kept when it is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from serin.spec.training import Execution
from serin.training.data.loader import Loader, StreamLoader
from serin.training.data.tables import Batch
from serin.training.engine.learner import Learner
from serin.training.engine.precision import Precision, candidates, choose_precision, matrix_products
from serin.training.engine.step import (
    WORTH_IT,
    CapturedStep,
    CapturedSteps,
    GraphedSteps,
    Step,
    seconds_per_step,
)
from serin.training.parallel.buffers import buffers_kept
from serin.training.parallel.dtensors import fill, full

_SHORT_S = 1e-3
_AT_ONCE = 8

Feed = Callable[[int, int], Iterator[Tensor | Batch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedStep:
    """A step and its input: batches, or row numbers for one that gathers them itself."""

    run: Callable[[Tensor | Batch], Tensor]
    feed: Feed
    kind: Execution
    reason: str
    precision: Precision
    precision_reason: str = ""
    stretch: GraphedSteps | None = None  # for many steps at once


def ready_step(
    learner: Learner,
    loader: Loader | StreamLoader,
    kind: Literal["auto"] | Execution,
    precision: Literal["auto"] | Precision,
) -> TunedStep:
    """Returns the step as wanted, or eager with the reason. Leaves weights and RNG state unchanged.

    `auto` uses a CUDA graph on a GPU when that is faster. It never compiles: that takes longer than most runs here
    last.
    """
    learner.step.gather = loader.take if isinstance(loader, Loader) else None
    with undone(learner):
        trial = _Trial(learner, loader)
        chosen, why = (precision, "") if precision != "auto" else trial.choose_precision(kind)
        learner.step.set_precision(chosen)
        with matrix_products(chosen):
            run, feed, found, reason = trial.prepare(kind)
            stretch = trial.stretch(run)
    return TunedStep(
        run=run,
        feed=feed,
        kind=found,
        reason=reason,
        precision=chosen,
        precision_reason=why,
        stretch=stretch,
    )


class _Trial:
    """Tries steps on the first rows to measure their cost."""

    def __init__(self, learner: Learner, loader: Loader | StreamLoader) -> None:
        self._learner, self._step, self._world, self._loader = learner, learner.step, learner.world, loader
        self._batches: Feed = loader.batches
        self._rows: Feed = loader.row_numbers if isinstance(loader, Loader) else loader.batches

    def choose_precision(self, kind: Literal["auto"] | Execution) -> tuple[Precision, str]:
        seconds: dict[Precision, float] = {}
        for precision in candidates(self._world.device):
            self._step.set_precision(precision)
            with matrix_products(precision):
                run, *_ = self.prepare(kind, sure=True)
                example = self._example()
                seconds[precision] = seconds_per_step(partial(run, example), self._world)
        return choose_precision(seconds, on_cpu=self._world.device.type == "cpu")

    def prepare(
        self, kind: Literal["auto"] | Execution, *, sure: bool = False
    ) -> tuple[Callable[[Tensor | Batch], Tensor], Feed, Execution, str]:
        """Prepares a kind of step. `sure`: use a CUDA graph where it is possible, without measuring whether it pays."""
        match kind:
            case "eager":
                return self._eager("asked for")
            case "compiled":
                return self._compiled()
            case "auto" | "cuda_graph":
                if self._learner.why_not_captured:
                    return self._eager(self._learner.why_not_captured)
                return self._captured(sure=sure or kind == "cuda_graph")

    def stretch(self, run: Callable[[Tensor | Batch], Tensor]) -> GraphedSteps | None:
        """Captures several steps at once, where one is short. All ranks do, or none."""
        example, many = self._example(), None
        if not isinstance(run, CapturedStep) or not isinstance(example, Tensor):
            return None
        if not isinstance(self._loader, Loader):
            return None
        if seconds_per_step(partial(run, example), self._world) > _SHORT_S:
            return None
        try:
            many = CapturedSteps(self._step, example, min(_AT_ONCE, self._loader.steps_per_epoch))
        except RuntimeError:  # probably out of memory: single steps do as well
            torch.cuda.synchronize(self._world.device)
            torch.cuda.empty_cache()
        (failed,) = self._world.agree([int(many is None)])
        return None if many is None or failed else GraphedSteps(many, self._loader, self._world.device)

    def _eager(self, reason: str) -> tuple[Step, Feed, Execution, str]:
        return self._step, self._batches, "eager", reason

    def _captured(self, *, sure: bool) -> tuple[Callable[[Tensor | Batch], Tensor], Feed, Execution, str]:
        example, captured, failure = self._example(), None, ""
        try:
            captured = CapturedStep(self._step, example)
        except RuntimeError as error:  # raised by torch for anything that a graph cannot hold
            torch.cuda.synchronize(self._world.device)
            torch.cuda.empty_cache()
            failure = _first_line(error)
        (failed,) = self._world.agree([int(captured is None)])
        if captured is None or failed:
            return self._eager(f"cannot be captured: {failure or 'another process could not'}")
        if sure:
            return captured, self._rows, "cuda_graph", "asked for"
        captured_s = seconds_per_step(lambda: captured(example), self._world)
        eager_s = seconds_per_step(lambda: self._step(example), self._world)
        reason = f"CUDA graph {captured_s * 1e3:.3f} ms, eager {eager_s * 1e3:.3f} ms per step"
        if eager_s <= WORTH_IT * captured_s:
            return self._eager(reason)
        return captured, self._rows, "cuda_graph", reason

    def _compiled(self) -> tuple[Callable[[Tensor | Batch], Tensor], Feed, Execution, str]:
        try:
            compiled = self._step.compiled()
            compiled(next(iter(self._batches(0, 1))))
        except RuntimeError as error:  # no compiler, or a network that cannot be traced
            return self._eager(f"cannot be compiled: {_first_line(error)}")
        return compiled, self._batches, "compiled", "asked for"

    def _example(self) -> Tensor | Batch:
        return next(iter(self._rows(0, 1)))


@contextmanager
def undone(learner: Learner) -> Iterator[None]:
    """Undoes the effects of the block on the learner."""
    network = learner.network
    before = {name: full(tensor).clone() for name, tensor in network.state_dict().items()}
    try:
        # Non-persistent buffers are not part of the state.
        with buffers_kept(network), torch.random.fork_rng(learner.world.gpus):
            yield
    finally:
        for name, tensor in network.state_dict().items():
            if name in before:
                fill(tensor, before[name])
        learner.updates.clear()
        learner.updates.forget()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
