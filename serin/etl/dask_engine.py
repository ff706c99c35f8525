"""The engine of a Dask cluster: a local one that is started here, or one whose scheduler the user names.

Workers and this process must see the same file system: the store, and the tables when they are local files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import distributed
from distributed.comm.core import CommClosedError
from distributed.scheduler import KilledWorker

from serin.errors import EngineFailed

_LocalCluster: Any = distributed.LocalCluster
_Client: Any = distributed.Client
CONNECT_S = 10.0
_FAN_IN = 8  # partial results merged at once


@contextmanager
def local_cluster(workers: int) -> Iterator[Any]:
    """A client of a cluster of processes on this machine, one thread each, reachable from this machine only."""
    with (
        _LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # any free port; none at all is not offered
            silence_logs=logging.ERROR,
        ) as cluster,
        _Client(cluster, set_as_default=False) as client,
    ):
        yield client


@contextmanager
def connect(address: str) -> Iterator[Any]:
    """A client of the scheduler at `address`."""
    try:
        client = _Client(address, set_as_default=False, timeout=CONNECT_S)
    except OSError as error:
        raise EngineFailed(engine=address, reason=f"no scheduler answers ({error})") from error
    with client:
        yield client


class DaskEngine:
    def __init__(self, client: Any) -> None:
        self._client = client
        self.workers = max(1, sum(client.nthreads().values()))

    def hold(self, function: Callable[..., Any], items: Sequence[Any], *shared: Any) -> list[Any]:
        return self._submit(function, [(item,) for item in items], shared)

    def then(self, function: Callable[..., Any], held: Sequence[Any], *shared: Any) -> list[Any]:
        return self._submit(function, [(value,) for value in held], shared)

    def collect(
        self,
        function: Callable[..., Any],
        held: Sequence[Any],
        *shared: Any,
        each: Sequence[Any] | None = None,
    ) -> list[Any]:
        pairs = [(value,) for value in held] if each is None else list(zip(held, each, strict=True))
        return self._gather(self._submit(function, pairs, shared))

    def reduce(
        self,
        function: Callable[..., Any],
        merge: Callable[[Any, Any], Any],
        held: Sequence[Any],
        *shared: Any,
    ) -> Any:
        futures = self._submit(function, [(value,) for value in held], shared)
        while len(futures) > 1:
            groups = [futures[start : start + _FAN_IN] for start in range(0, len(futures), _FAN_IN)]
            futures = [self._client.submit(_merge_all, merge, *group, pure=False) for group in groups]
        return self._gather(futures)[0]

    def _submit(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], shared: tuple[Any, ...]
    ) -> list[Any]:
        (placed,) = self._client.scatter(
            [shared], broadcast=True, hash=False
        )  # a list: it scatters the items of one
        return [self._client.submit(_apply, function, placed, *own, pure=False) for own in arguments]

    def _gather(self, futures: list[Any]) -> list[Any]:
        try:
            return list(self._client.gather(futures))
        except (KilledWorker, CommClosedError) as error:
            raise EngineFailed(
                engine="dask", reason=f"a worker died ({error}); give it more memory, or fewer etl.workers"
            ) from error


def _apply(function: Callable[..., Any], shared: tuple[Any, ...], *own: Any) -> Any:
    return function(*own, *shared)


def _merge_all(merge: Callable[[Any, Any], Any], *parts: Any) -> Any:
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(merged, part)
    return merged
