"""One optimizer step: forward, backward, update.

It runs eagerly, with the network compiled, or captured whole as a CUDA graph: gather, forward, backward, clipping and
update are then one launch. No kind waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from serin.training.data.loader import Loader
from serin.training.data.tables import Batch
from serin.training.engine.optimizer import Optimizer
from serin.training.engine.precision import Precision, computing
from serin.training.parallel.gradients import Loss
from serin.training.parallel.parallelize import Parallelized
from serin.training.parallel.ranks import Ranks

_WARM_UPS = 3
_MEASURED_STEPS = 20
WORTH_IT = 1.02  # speed-up over eager that is required, else the simpler way is used
_RATES = 1024  # learning rates copied to the device at a time


class Step:
    """The eager step.

    `parts`: the number of parts in which the rows go through the network. `gather` makes a batch of row numbers, if a
    step is given those.
    """

    def __init__(
        self,
        spread: Parallelized,
        updates: Optimizer,
        loss: Loss,
        *,
        precision: Precision,
        world: Ranks,
        parts: int = 1,
    ) -> None:
        self.updates = updates
        self.parts = parts
        self.gather: Callable[[Tensor], Batch] | None = None
        self.world = world
        self._spread, self._loss = spread, loss
        self.set_precision(precision)

    def set_precision(self, precision: Precision) -> None:
        self.precision = precision
        self.updates.scale_losses(precision == "fp16")

    def __call__(self, rows: Tensor | Batch) -> Tensor:
        """Returns the mean loss of the rows, still on the device."""
        self.updates.clear()
        if isinstance(rows, Tensor):
            assert self.gather is not None
            rows = self.gather(rows)
        loss = self._spread.learn(
            rows.cut(self.parts),
            self._loss,
            lambda: computing(self.precision, self.world.device),
            self.updates.scale,
        )
        self.updates.apply()
        return loss

    def buffer_places(self) -> dict[str, int]:
        """Returns the memory addresses of the network's buffers."""
        return {name: buffer.data_ptr() for name, buffer in self._spread.network.named_buffers()}

    def compiled(self) -> Step:
        """Returns the same step with its forward and backward compiled at the first call."""
        made = copy(self)
        made._spread = self._spread.compiled()  # noqa: SLF001
        return made


class CapturedStep:
    """The step as one CUDA graph, over row numbers or a batch at fixed addresses."""

    def __init__(self, step: Step, example: Tensor | Batch) -> None:
        self.updates = step.updates
        self._graph = torch.cuda.CUDAGraph()
        self._place = example.clone()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                step(self._place)
            self.updates.clear()
        torch.cuda.current_stream().wait_stream(side)
        places = step.buffer_places()
        # Threads that load rows continue in the meantime: their work must not be captured in this stream.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = step(self._place)
        replaced = sorted(name for name, place in step.buffer_places().items() if places.get(name) != place)
        if replaced:  # every replay would read the old tensor
            raise RuntimeError(
                f"the buffer {replaced[0]} is replaced in a step; change it in place, by copy_()"
            )

    def __call__(self, rows: Tensor | Batch) -> Tensor:
        self._place.copy_(rows)  # type: ignore[arg-type]
        self._graph.replay()
        return self._loss


class CapturedSteps:
    """Several consecutive steps as one CUDA graph, for steps so short that launches matter.

    Create it after one step was captured, which has warmed everything up.
    """

    def __init__(self, step: Step, example: Tensor, count: int) -> None:
        self.count = count
        self._rows = example.expand(count, -1).contiguous()
        self._rates = torch.zeros(count, device=example.device)
        self._losses = torch.zeros(count, device=example.device)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for number in range(count):
                step.updates.copy_rate(self._rates[number])
                self._losses[number].copy_(step(self._rows[number]))

    def __call__(self, rows: Tensor, rates: Tensor) -> Tensor:
        """Returns the losses of `count` steps over rows [count, n] with a rate each."""
        self._rows.copy_(rows)
        self._rates.copy_(rates)
        self._graph.replay()
        return self._losses


def seconds_per_step(
    step: Callable[[], Tensor], world: Ranks, *, within_s: float | None = None, steps: int = _MEASURED_STEPS
) -> float:
    """Returns seconds per step over a few steps after a warm-up; the slowest rank's, the same on all of them.

    `within_s`: as many steps as fit into that time, at least two. On a CPU the fastest counts, since other programs may
    run there.
    """
    first = _timed(step, world, 1)
    if within_s is not None:
        (first_ns,) = world.agree([int(first * 1e9)])
        steps = max(2, min(steps, int(within_s * 1e9 / max(1, first_ns))))
    gpu = world.device.type == "cuda"
    seconds = _timed(step, world, steps) if gpu else min(_timed(step, world, 1) for _ in range(steps))
    (nanoseconds,) = world.agree([int(seconds * 1e9)])
    return nanoseconds / 1e9


def _timed(step: Callable[[], Tensor], world: Ranks, steps: int) -> float:
    """Returns seconds per step."""
    _finish(world.device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _finish(world.device)
    return (time.perf_counter() - began) / steps


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class GraphedSteps:
    def __init__(self, many: CapturedSteps, loader: Loader, device: torch.device) -> None:
        self._many, self._loader, self._device = many, loader, device
        self.count = many.count
        self._first, self._rates = 0, torch.empty(0)

    def run(self, step: int, rate_at: Callable[[int], float]) -> Tensor:
        """Returns the losses of the `count` steps from `step` on, which must be in one epoch."""
        at = step - self._first
        if at < 0 or at + self.count > len(self._rates):
            ahead = min(_RATES, self._loader.steps_per_epoch - step % self._loader.steps_per_epoch)
            self._rates = torch.tensor([rate_at(step + number) for number in range(ahead)]).to(self._device)
            self._first, at = step, 0
        return self._many(self._loader.rows_of_many(step, self.count), self._rates[at : at + self.count])
