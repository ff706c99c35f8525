"""The engine of one process: threads over pieces. numpy, Arrow and CUDA release the lock where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Self

from serin.etl.engines.device import OnGpu, free_gpu_bytes, take_rescues
from serin.etl.engines.memory_budget import available_bytes
from serin.etl.engines.progress import ignore_progress
from serin.etl.engines.spill import Spilled, loaded, spill

_GPU_THREADS = 2  # one prepares what the GPU does next while the other waits for it


class ProcessEngine:
    """`scratch`: a folder where held values are kept instead of in memory. `gpu`: values may be on a GPU."""

    def __init__(self, workers: int, *, scratch: Path | None = None, gpu: bool = False) -> None:
        self.workers = workers
        self.gpu = gpu
        self.gpus = int(gpu)
        free = available_bytes() // 2
        threads = min(workers, _GPU_THREADS) if gpu else workers
        self.budget_bytes = (min(free, free_gpu_bytes() // 2) if gpu else free) // threads
        self.tell: Callable[[int, int], None] = ignore_progress
        self._scratch = None if scratch is None else str(scratch)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="etl")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def hold(self, function: Callable[..., Any], items: Sequence[Any], *shared: Any) -> list[Any]:
        return self._run([partial(self._kept, function, item, *shared) for item in items])

    def then(self, function: Callable[..., Any], held: Sequence[Any], *shared: Any) -> list[Any]:
        values = self._run([partial(self._kept, self._safe(function), value, *shared) for value in held])
        for value in held:
            if isinstance(value, Spilled):
                value.remove()
        return values

    def collect(
        self,
        function: Callable[..., Any],
        held: Sequence[Any],
        *shared: Any,
        each: Sequence[Any] | None = None,
    ) -> list[Any]:
        safe = self._safe(function)
        if each is None:
            return self._run([partial(_call, safe, value, *shared) for value in held])
        pairs = zip(held, each, strict=True)
        return self._run([partial(_call, safe, value, own, *shared) for value, own in pairs])

    def reduce(
        self,
        function: Callable[..., Any],
        merge: Callable[[Any, Any], Any],
        held: Sequence[Any],
        *shared: Any,
    ) -> Any:
        safe = self._safe(function)
        waiting = {self._threads.submit(_call, safe, value, *shared) for value in held}
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

    def rescues(self) -> int:
        return take_rescues()

    def _safe(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return OnGpu(function) if self.gpu else function

    def _kept(self, function: Callable[..., Any], value: Any, *shared: Any) -> Any:
        made = _call(function, value, *shared)
        return made if self._scratch is None else spill(made, self._scratch)

    def _run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        futures = [self._threads.submit(task) for task in tasks]
        try:
            results = []
            for future in futures:
                results.append(future.result())
                self.tell(len(results), len(futures))
            return results
        except BaseException:
            _cancel(futures)
            raise


def _call(function: Callable[..., Any], value: Any, *arguments: Any) -> Any:
    return function(loaded(value), *arguments)


def _cancel(futures: Any) -> None:
    """Stops work whose result is lost."""
    pending: list[Future[Any]] = list(futures)
    for future in pending:
        future.cancel()
    wait(pending)
