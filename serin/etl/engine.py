"""Where the pieces of a table are worked on. An engine maps and merges; it never knows what is computed.

What `hold` computed stays where it was computed, and only small results travel. The order of pieces is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import psutil

from serin.etl.process_engine import ProcessEngine, available_cores
from serin.spec.stages import EtlSpec

Held = Sequence[Any]  # one handle per piece; what it is, is the engine's own matter


class Engine(Protocol):
    workers: int

    def hold(self, function: Callable[..., Any], items: Sequence[Any], *shared: Any) -> Held:
        """function(item, *shared) for each item, kept."""
        ...

    def then(self, function: Callable[..., Any], held: Held, *shared: Any) -> Held:
        """function(value, *shared) for each value held, kept instead of it."""
        ...

    def collect(
        self, function: Callable[..., Any], held: Held, *shared: Any, each: Sequence[Any] | None = None
    ) -> list[Any]:
        """function(value, [its own item of `each`,] *shared) for each value held, brought here."""
        ...

    def reduce(
        self, function: Callable[..., Any], merge: Callable[[Any, Any], Any], held: Held, *shared: Any
    ) -> Any:
        """What `collect` gives, merged to one. `merge` must not depend on how pieces are grouped."""
        ...


@contextmanager
def open_engine(etl: EtlSpec, needed_bytes: int) -> Iterator[Engine]:
    """The engine the spec asks for; `auto`: one process while the columns fit well into memory, else a cluster."""
    workers = available_cores() if etl.workers == "auto" else etl.workers
    roomy = needed_bytes < psutil.virtual_memory().available // 2
    if etl.engine == "process" or (etl.engine == "auto" and roomy):
        with ProcessEngine(workers, keep=roomy) as engine:
            yield engine
        return
    from serin.etl.dask_engine import (  # half a second that small tables save
        DaskEngine,
        connect,
        local_cluster,
    )

    opened = connect(etl.engine) if "://" in etl.engine else local_cluster(workers)
    with opened as client:
        yield DaskEngine(client)
