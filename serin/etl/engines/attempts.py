"""Chooses a suitable engine and runs a build on it. When memory runs out, tries again with smaller pieces, then on the
host.

Results do not depend on engine or pieces, so a second attempt gives what the first would have given.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from serin.errors import ClusterNotUp, EngineFailed, GpuUnusable
from serin.etl.binding.layout import Layout
from serin.etl.engines.device import Gpus, memory_pool, usable_gpus
from serin.etl.engines.engine import Engine, ProcessEngine
from serin.etl.engines.memory_budget import (
    MIN_ROWS,
    available_bytes,
    needed_bytes,
    plan_gpu_rows,
    plan_rows,
    row_bytes,
)
from serin.etl.engines.pieces import cut_pieces
from serin.etl.sources.tables import Piece, Table
from serin.machine import environment
from serin.machine.hardware import core_count
from serin.spec.etl import EtlSpec, gpus_wanted

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ROWS = (2**16, 2**19)  # least and most rows of a piece on the host
_GPU_HALVINGS = 2  # then the host
_GPU_THREADS = 16  # that read for one GPU


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
    if choice.kind in ("process", "cuda"):
        gpu = choice.kind == "cuda"
        pool = memory_pool() if gpu else nullcontext()
        with pool, ProcessEngine(choice.workers, scratch=spill, gpu=gpu) as engine:
            yield engine
        return
    from serin.etl.engines import dask_engine  # half a second that small tables save
    from serin.machine.dask_cluster import local_cluster

    if choice.kind == "dask-cuda":
        opened = dask_engine.cuda_cluster(choice.workers, scratch)
    elif choice.kind == "dask":
        opened = local_cluster(choice.workers)
    else:
        opened = dask_engine.connect(choice.kind, scratch)
    with opened as client:
        gpu = choice.kind == "dask-cuda" or (
            choice.kind != "dask" and dask_engine.every_worker_has_a_gpu(client)
        )
        keep = choice.keep and choice.needed_bytes < dask_engine.memory_bytes(client) // 4
        yield dask_engine.DaskEngine(client, scratch=scratch, keep=keep, gpu=gpu)


def run_within_memory(
    run: Callable[[Engine, Sequence[Piece], int], T],
    *,
    table: Table,
    layout: Layout,
    etl: EtlSpec,
    data_bytes: int,
    scratch: Path,
    piece_rows: int | None = None,
) -> T:
    """Runs `run` on an engine that suits spec, machine and table; again, with smaller pieces, whenever memory runs out.

    It gets the engine, the pieces, and how many rows may be processed at once. `data_bytes`: the size of all tables'
    files, by which a GPU is chosen.
    """
    needed, free = needed_bytes(layout, table), available_bytes()
    choose = partial(choose_engine, etl, data_bytes=data_bytes, needed_bytes=needed, free_bytes=free)
    none = Gpus(count=0, memory_bytes=0)
    choice = choose(gpus=usable_gpus() if etl.engine in ("auto", "cuda", "dask-cuda") else none)
    halvings = 0
    while True:
        logger.info(f"engine {choice.kind} ({choice.why})")
        held = scratch / "held"
        held.mkdir()
        try:
            with open_engine(choice, held) as engine:
                rows = piece_rows or _planned(layout, table, engine)
                rows = max(1, rows >> halvings)
                fitting = 0 if piece_rows or halvings else engine.budget_bytes // row_bytes(layout, table)
                pieces = cut_pieces(table, layout.reads, rows, scratch, fitting)
                result = run(engine, pieces, rows)
                if rescued := engine.rescues():
                    logger.info(f"the GPU was full {rescued} times; the host did the work of those pieces")
                return result
        except GpuUnusable as error:
            if etl.engine != "auto":
                raise
            logger.info(f"{error}; continuing without it")
            choice = choose(gpus=none)
        except ClusterNotUp as error:
            logger.info(f"{error}; continuing with one GPU")
            why = "no cluster started"
            choice = replace(choice, kind="cuda", workers=core_count(), why=why)
        except MemoryError as error:
            logger.info(f"memory ran out with pieces of {rows:,} rows ({type(error).__name__}: {error})")
            choice, halvings = _smaller(choice, rows, halvings, error)
        finally:
            shutil.rmtree(held)


def _planned(layout: Layout, table: Table, engine: Engine) -> int:
    if engine.gpu:
        return plan_gpu_rows(layout, table, budget_bytes=engine.budget_bytes, gpus=engine.gpus)
    least, most = _ROWS
    return plan_rows(
        layout, table, budget_bytes=engine.budget_bytes, workers=engine.workers, least=least, most=most
    )


def _smaller(choice: Choice, rows: int, halvings: int, error: MemoryError) -> tuple[Choice, int]:
    """What to try next: pieces of half the size, kept on disk; after a GPU's last try, the host."""
    if "cuda" in choice.kind and (halvings >= _GPU_HALVINGS or rows <= MIN_ROWS):
        return replace(choice, kind="process", keep=False, why="the GPU has too little memory"), 0
    if rows <= MIN_ROWS:
        raise EngineFailed(
            engine=choice.kind,
            reason=f"even {rows:,} rows at a time are too many for the memory here ({error})",
        ) from error
    return replace(choice, keep=False, why="smaller pieces, kept on disk"), halvings + 1
