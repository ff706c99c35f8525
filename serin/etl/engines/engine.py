"""The engine interface, and the engine of one process. An engine maps and merges over the pieces of a table and never
knows what is computed.

Values that `hold` computed stay where they were computed, and only small results are sent. The order of pieces is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

from serin.etl.engines.device import OnGpu, compute_on_gpu, free_gpu_bytes, take_rescues
from serin.etl.engines.memory_budget import available_bytes
from serin.etl.engines.spill import Spilled, loaded, spill

Held = Sequence[Any]  # one handle per piece, opaque to callers
Arguments = Sequence[tuple[Any, ...]]  # what each piece's call gets before that which all share
_GPU_THREADS = 2  # one prepares what the GPU does next while the other waits for it


class Engine(ABC):
    """An engine raises MemoryError when a piece is too large for it: retry with smaller pieces."""

    workers: int
    gpu: bool  # pieces go to a GPU
    gpus: int  # how many of them work at the same time
    budget_bytes: int  # that one worker may use for a piece

    def __init__(self) -> None:
        # called with (done, all) as the pieces of a pass are finished
        self.tell: Callable[[int, int], None] = lambda *_: None

    def hold(self, function: Callable[..., Any], items: Sequence[Any], *shared: Any) -> Held:
        """function(item, *shared) for each item, kept."""
        return self._run(function, [(item,) for item in items], shared, keep=True)

    def then(self, function: Callable[..., Any], held: Held, *shared: Any) -> Held:
        """function(value, *shared) for each value held, kept instead of it."""
        values = self._run(self._safe(function), [(value,) for value in held], shared, keep=True)
        for value in held:
            if isinstance(value, Spilled):
                value.remove()
        return values

    def collect(
        self, function: Callable[..., Any], held: Held, *shared: Any, each: Sequence[Any] | None = None
    ) -> list[Any]:
        """function(value, [its own item of `each`,] *shared) for each value held, brought here."""
        arguments = [(value,) for value in held] if each is None else list(zip(held, each, strict=True))
        return self._run(self._safe(function), arguments, shared, keep=False)

    @abstractmethod
    def reduce(
        self, function: Callable[..., Any], merge: Callable[[Any, Any], Any], held: Held, *shared: Any
    ) -> Any:
        """What `collect` gives, merged to one. `merge` must not depend on how pieces are grouped."""
        ...

    def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments) of values in this process, on its GPU when the engine has one here."""
        return function(*arguments)

    @abstractmethod
    def rescues(self) -> int:
        """How often the host had to do a GPU's work, since the GPU was full."""
        ...

    @abstractmethod
    def _run(
        self, function: Callable[..., Any], arguments: Arguments, shared: tuple[Any, ...], *, keep: bool
    ) -> list[Any]:
        """The results, or with `keep` handles of them."""

    def _safe(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return OnGpu(function) if self.gpu else function


def call(function: Callable[..., Any], scratch: str | None, shared: tuple[Any, ...], *own: Any) -> Any:
    """function(*own, *shared); in a file in the folder `scratch`, when there is one."""
    result = function(*(loaded(value) for value in own), *shared)
    return result if scratch is None else spill(result, scratch)


class ProcessEngine(Engine):
    """Threads over pieces: numpy, Arrow and CUDA release the lock where the time goes. `scratch`: a folder where held
    values are kept instead of in memory. `gpu`: values may be on a GPU."""

    def __init__(self, workers: int, *, scratch: Path | None = None, gpu: bool = False) -> None:
        self.workers = workers
        self.gpu = gpu
        self.gpus = int(gpu)
        free = available_bytes() // 2
        threads = min(workers, _GPU_THREADS) if gpu else workers
        self.budget_bytes = (min(free, free_gpu_bytes() // 2) if gpu else free) // threads
        super().__init__()
        self._scratch = None if scratch is None else str(scratch)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="etl")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def reduce(
        self, function: Callable[..., Any], merge: Callable[[Any, Any], Any], held: Held, *shared: Any
    ) -> Any:
        safe = self._safe(function)
        waiting = {self._threads.submit(call, safe, None, shared, value) for value in held}
        merged: list[Any] = []
        total = len(waiting)
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                self.tell(total - len(waiting), total)
                for future in done:
                    merged = [merge(merged[0], future.result())] if merged else [future.result()]
        except BaseException:
            _cancel(waiting)
            raise
        return merged[0]

    def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return compute_on_gpu(function, *arguments) if self.gpu else function(*arguments)

    def rescues(self) -> int:
        return take_rescues()

    def _run(
        self, function: Callable[..., Any], arguments: Arguments, shared: tuple[Any, ...], *, keep: bool
    ) -> list[Any]:
        scratch = self._scratch if keep else None
        futures = [self._threads.submit(call, function, scratch, shared, *own) for own in arguments]
        try:
            results = []
            for future in futures:
                results.append(future.result())
                self.tell(len(results), len(futures))
            return results
        except BaseException:
            _cancel(futures)
            raise


def _cancel(futures: Any) -> None:
    """Stops work whose result is lost."""
    pending: list[Future[Any]] = list(futures)
    for future in pending:
        future.cancel()
    wait(pending)
