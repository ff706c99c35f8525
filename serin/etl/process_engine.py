"""The engine of one process: threads over pieces. numpy and Arrow release the lock where the time goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Self


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


class ProcessEngine:
    """`keep` off: values are computed again at each use, so that no more than one piece per thread is in memory."""

    def __init__(self, workers: int, *, keep: bool = True) -> None:
        self.workers = workers
        self._keep = keep
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="etl")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def hold(
        self, function: Callable[..., Any], items: Sequence[Any], *shared: Any
    ) -> list[Callable[[], Any]]:
        return self._held([partial(function, item, *shared) for item in items])

    def then(
        self, function: Callable[..., Any], held: Sequence[Callable[[], Any]], *shared: Any
    ) -> list[Callable[[], Any]]:
        return self._held([partial(_call, function, value, *shared) for value in held])

    def collect(
        self,
        function: Callable[..., Any],
        held: Sequence[Callable[[], Any]],
        *shared: Any,
        each: Sequence[Any] | None = None,
    ) -> list[Any]:
        if each is None:
            return self._run([partial(_call, function, value, *shared) for value in held])
        pairs = zip(held, each, strict=True)
        return self._run([partial(_call, function, value, own, *shared) for value, own in pairs])

    def reduce(
        self,
        function: Callable[..., Any],
        merge: Callable[[Any, Any], Any],
        held: Sequence[Callable[[], Any]],
        *shared: Any,
    ) -> Any:
        waiting = {self._threads.submit(_call, function, value, *shared) for value in held}
        merged: list[Any] = []
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    merged = [merge(merged[0], future.result())] if merged else [future.result()]
        except BaseException:
            _cancel(waiting)
            raise
        return merged[0]

    def _held(self, tasks: list[Callable[[], Any]]) -> list[Callable[[], Any]]:
        return [partial(_same, value) for value in self._run(tasks)] if self._keep else tasks

    def _run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        futures = [self._threads.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            _cancel(futures)
            raise


def _call(function: Callable[..., Any], value: Callable[[], Any], *arguments: Any) -> Any:
    return function(value(), *arguments)


def _same(value: Any) -> Any:
    return value


def _cancel(futures: Any) -> None:
    """Nobody goes on with work whose result is lost."""
    pending: list[Future[Any]] = list(futures)
    for future in pending:
        future.cancel()
    wait(pending)
