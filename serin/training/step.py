"""One optimizer step: rows through the network, gradients back, weights changed.

Plain (eager), with the network compiled, or captured whole as a CUDA graph: gather, forward, backward, clipping and
update are then one launch. Neither kind waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy

import torch
from torch import Tensor, nn

from serin.training.losses import Loss
from serin.training.precision import Precision, computing
from serin.training.tables import Batch
from serin.training.updates import Updates
from serin.training.world import World

_WARM_UPS = 3
_MEASURED_STEPS = 20
_WORTH_IT = 1.05  # times as fast as eager, or the simpler way is taken


class Step:
    """The eager step. `parts`: into how many the rows are cut on their way through the network. `gather` makes a batch
    of row numbers, where a step is given those."""

    def __init__(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        updates: Updates,
        loss: Loss,
        *,
        precision: Precision,
        world: World,
        gather: Callable[[Tensor], Batch] | None = None,
        parts: int = 1,
    ) -> None:
        self.updates = updates
        self.parts = parts
        self._gather = gather
        self._forward, self._loss, self._precision, self._world = forward, loss, precision, world

    def __call__(self, rows: Tensor | Batch) -> Tensor:
        """The mean loss of the rows, still on the device."""
        self.updates.clear()
        batch = self._batch(rows)
        total: Tensor | None = None
        pieces = batch.cut(self.parts)
        for number, piece in enumerate(pieces):
            with self._shared_at_the_last(number + 1 == len(pieces)):
                with computing(self._precision, self._world.device):
                    loss = self._loss(self._forward(piece.num, piece.cat), piece.target)
                    loss = loss / len(pieces) if len(pieces) > 1 else loss
                torch.autograd.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        self.updates.apply()
        assert total is not None
        return total

    def _batch(self, rows: Tensor | Batch) -> Batch:
        if isinstance(rows, Batch):
            return rows
        assert self._gather is not None
        return self._gather(rows)

    def compiled(self) -> Step:
        """The same step with its forward and backward compiled, at the first call."""
        forward = torch.compile(self._forward)
        made = copy(self)
        made._forward = forward  # noqa: SLF001
        return made

    def _shared_at_the_last(self, last: bool) -> AbstractContextManager[object]:
        """Gradients are averaged over the ranks once, not for every part."""
        if last or not isinstance(self._forward, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return self._forward.no_sync()


class CapturedStep:
    """The step as one CUDA graph, over row numbers or a batch that always lie in the same place."""

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
        # Threads that bring rows go on meanwhile: what they do must not count as part of this stream.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = step(self._place)

    def __call__(self, rows: Tensor | Batch) -> Tensor:
        self._place.copy_(rows)  # type: ignore[arg-type]
        self._graph.replay()
        return self._loss


def seconds_per_step(step: Callable[[], Tensor], device: torch.device) -> float:
    """Over a few steps, after one that does not count."""
    step()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_MEASURED_STEPS):
        step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / _MEASURED_STEPS


def capture_pays(eager_s: float, captured_s: float) -> bool:
    return eager_s > _WORTH_IT * captured_s
