"""The engine interface: an engine maps and merges over the pieces of a table and never knows what is computed.

Values that `hold` computed stay where they were computed, and only small results are sent. The order of pieces is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from serin.errors import EngineFailed
from serin.etl.engines.device import Gpus, memory_pool
from serin.etl.engines.process_engine import ProcessEngine
from serin.machine import environment
from serin.machine.hardware import core_count
from serin.spec.etl import EtlSpec, gpus_wanted

Held = Sequence[Any]  # one handle per piece, opaque to callers
_GPU_THREADS = 16  # that read for one GPU


class Engine(Protocol):
    """An engine raises MemoryError when a piece is too large for it: retry with smaller pieces."""

    workers: int
    gpu: bool  # pieces go to a GPU
    gpus: int  # how many of them work at the same time
    budget_bytes: int  # that one worker may use for a piece
    tell: Callable[[int, int], None]  # called with (done, all) as the pieces of a pass are finished

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

    def rescues(self) -> int:
        """How often the host had to do a GPU's work, since the GPU was full."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`kind`: process, dask, cuda, dask-cuda, or a scheduler's address. `keep`: pieces stay in memory."""

    kind: str
    workers: int
    keep: bool
    why: str
    needed_bytes: int = 0  # to keep all pieces


def choose_engine(etl: EtlSpec, *, data_bytes: int, needed_bytes: int, free_bytes: int, gpus: Gpus) -> Choice:
    """What the spec asks for; `auto`: a GPU for much data, one process for what fits, else a cluster of processes."""
    wanted = gpus_wanted(etl.engine, data_bytes=data_bytes, usable=gpus.count)
    cores = core_count() if etl.workers == "auto" else etl.workers
    roomy = needed_bytes < free_bytes // 2
    size = f"{needed_bytes / 1e6:,.0f} MB for the pieces, {free_bytes / 1e6:,.0f} MB free"
    kind, why = etl.engine, "as requested"
    if kind == "auto":
        if wanted:
            kind, why = "cuda", f"{wanted} GPU(s), {data_bytes / 1e6:,.0f} MB of tables"
        elif roomy:
            kind, why = "process", size
        else:
            kind, why = "dask", f"{size}: processes with limited memory, pieces on disk"
    if kind == "dask" and (scheduler := environment.dask_scheduler()) is not None:
        kind, why = scheduler, f"{why}; SERIN_DASK"
    if kind in ("cuda", "dask-cuda"):
        if not wanted:
            raise EngineFailed(engine=kind, reason="no GPU that cupy could use is here; use engine: auto")
        keep = roomy and needed_bytes < gpus.memory_bytes // 3
        if wanted > 1 or kind == "dask-cuda":
            workers = wanted if etl.workers == "auto" else etl.workers
            return Choice(kind="dask-cuda", workers=workers, keep=keep, why=why, needed_bytes=needed_bytes)
        workers = min(_GPU_THREADS, cores) if etl.workers == "auto" else etl.workers
        return Choice(kind="cuda", workers=workers, keep=keep, why=why)
    return Choice(kind=kind, workers=cores, keep=roomy, why=why, needed_bytes=needed_bytes)


@contextmanager
def open_engine(choice: Choice, scratch: Path) -> Iterator[Engine]:
    """The chosen engine; `scratch` is a folder that all workers see."""
    spill = None if choice.keep else scratch
    if choice.kind == "process":
        with ProcessEngine(choice.workers, scratch=spill) as engine:
            yield engine
        return
    if choice.kind == "cuda":
        with memory_pool(), ProcessEngine(choice.workers, scratch=spill, gpu=True) as engine:
            yield engine
        return
    from serin.etl.engines import dask_engine  # half a second that small tables save

    if choice.kind == "dask-cuda":
        opened = dask_engine.cuda_cluster(choice.workers, scratch)
    elif choice.kind == "dask":
        opened = dask_engine.local_cluster(choice.workers)
    else:
        opened = dask_engine.connect(choice.kind, scratch)
    with opened as client:
        gpu = choice.kind == "dask-cuda" or (
            choice.kind != "dask" and dask_engine.every_worker_has_a_gpu(client)
        )
        keep = choice.keep and choice.needed_bytes < dask_engine.memory_bytes(client) // 4
        yield dask_engine.DaskEngine(client, scratch=scratch, keep=keep, gpu=gpu)
