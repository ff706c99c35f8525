"""The GPU as the engines use it: its memory, copies to the host, and the fallback when it is full."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3

from serin.columns.column import Column, array_module, on_host
from serin.errors import GpuUnusable
from serin.etl.engines.subnormals import keep_subnormals, warn_if_flushed
from serin.formats.shards import Rows, place_rows, write_at, write_rows
from serin.machine import environment
from serin.machine.durable import begin_sync_beside
from serin.machine.hardware import inventory
from serin.spec.features import FeatureSpec
from serin.store.waits import waiting_in_process

F = TypeVar("F", bound=Callable[..., Any])
FileDigests = dict[Path, tuple[int, bytes]]  # of each file so many bytes, from its first on, and their digest
_rescued: list[int] = []  # appending is safe from any thread
QUICK_COMPILER = ("CUPY_NVRTC_USE_PCH", "1")  # a first run compiles its kernels in two thirds of the time
_STAGE_BYTES = 2**23  # of locked memory that a thread copies through
_WRITERS = 16
_START = "imports of cuDF and start of the GPU for etl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    count: int
    memory_bytes: int  # of all of them together


def usable_gpus() -> Gpus:
    """The GPUs the ETL could use: those that are visible to this process, when cupy is installed. A stage shows the
    process what it has leased."""
    found = inventory() if importlib.util.find_spec("cupy") is not None else ()
    return Gpus(count=len(found), memory_bytes=sum(_usable(device.memory_bytes) for device in found))


def host_columns(features: Sequence[FeatureSpec]) -> list[str]:
    """The columns that have to come to the host, since a step of theirs runs only there."""
    unfit = [feature for feature in features if not all(step.on_gpu for step in feature.steps)]
    return list(dict.fromkeys(column for feature in unfit for column in feature.columns))


def free_gpu_bytes() -> int:
    import cupy

    return _usable(int(cupy.cuda.runtime.memGetInfo()[0]))


def _usable(memory_bytes: int) -> int:
    """So much of a GPU's memory, or less if this process may use less."""
    return min(memory_bytes, environment.gpu_memory_bytes() or memory_bytes)


@contextmanager
def memory_pool() -> Iterator[None]:
    """One pool for cupy and cuDF while the block runs; given back after it, since torch must not share it.
    GpuUnusable when cupy and the driver do not get on with each other."""
    environment.prefer(*QUICK_COMPILER)
    try:
        with waiting_in_process(_START):
            import cupy

            free_gpu_bytes()
            keep_subnormals()
            warn_if_flushed()
    except (ImportError, RuntimeError) as error:
        raise GpuUnusable(reason=f"{type(error).__name__}: {error}") from error
    if importlib.util.find_spec("rmm") is None:  # cupy's own pool then
        try:
            yield
        finally:
            cupy.get_default_memory_pool().free_all_blocks()
        return
    import rmm
    from rmm.allocators.cupy import rmm_cupy_allocator

    before, allocator = rmm.mr.get_current_device_resource(), cupy.cuda.get_allocator()
    pool = rmm.mr.CudaAsyncMemoryResource()  # takes what is used, no more
    if limit := environment.gpu_memory_bytes():
        pool = rmm.mr.LimitingResourceAdaptor(pool, allocation_limit=limit)
    rmm.mr.set_current_device_resource(pool)
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    if importlib.util.find_spec("pylibcudf") is not None:
        with waiting_in_process(_START):
            importlib.import_module("pylibcudf")  # here, where no thread of the engine waits for it
    gc.freeze()  # modules are not looked at in the end, which takes a tenth of a second
    try:
        yield
    finally:
        gc.collect()  # arrays in cycles would keep the pool
        gc.unfreeze()
        cupy.cuda.set_allocator(allocator)
        rmm.mr.set_current_device_resource(before)


class HostColumns(Mapping[str, Column]):
    """Columns that are copied from the GPU on access."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Column:
        return self._columns[name].on_host()

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def to_host(value: Any) -> Any:
    """A piece, or a part of one, in this machine's memory; its columns are copied on access."""
    if isinstance(value, Column):
        return value.on_host()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: to_host(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, Mapping) and value and all(isinstance(each, Column) for each in value.values()):
        return HostColumns(value)
    on_gpu = type(value).__module__.partition(".")[0] == "cupy"
    return on_host(value) if on_gpu else value


def to_gpu(value: Any) -> Any:
    """A piece, or a part of one, with all its arrays on the GPU."""
    import cupy

    if isinstance(value, Column):
        return Column(kind=value.kind, values=cupy.asarray(value.values), dictionary=value.dictionary)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: to_gpu(getattr(value, each.name)) for each in fields(value)})
    if isinstance(value, Mapping) and value and all(isinstance(each, Column) for each in value.values()):
        return {name: to_gpu(column) for name, column in value.items()}
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def gpu_aware(function: F) -> F:
    """Marks a function that works on arrays on any device; all others get host arrays."""
    function.on_gpu = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A function of a piece; the host runs what is not aware of GPUs, and what a full GPU cannot do."""

    function: Callable[..., Any]

    def __call__(self, value: Any, *rest: Any) -> Any:
        if getattr(self.function, "on_gpu", False):
            try:
                return self.function(value, *rest)
            except MemoryError:
                _rescued.append(1)
        return self.function(to_host(value), *rest)


def compute_on_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), which are on the host, as is the result; by the host where the GPU is too small."""
    try:
        return to_host(function(*(to_gpu(value) for value in arguments)))
    except MemoryError:
        _rescued.append(1)
    return function(*arguments)


def take_rescues() -> int:
    """How many pieces were worked on by the host since the last call, because the GPU was full."""
    count = len(_rescued)
    del _rescued[:count]
    return count


def store_rows(places: Iterable[tuple[Path, int, Rows]], digested: Collection[str] = ()) -> FileDigests:
    """What `write_rows` does for each (split, start, rows), wherever the rows are: a GPU's go out file by file, through
    locked memory, all splits side by side. Files named in `digested` are digested on the way, where this is their
    beginning."""
    digests: FileDigests = {}
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="from-gpu") as pool:
        waiting: list[Future[None]] = []
        for split, start, rows in places:
            arrays = (rows.num, rows.cat, rows.target, rows.rows)
            if any(isinstance(array, np.ndarray) for array in arrays):
                num, cat, target, ids = (on_host(array) for array in arrays)
                here = Rows(num=num, cat=cat, target=target, rows=ids)
                waiting.append(pool.submit(write_rows, split, start, here))
                continue
            array_module(rows.num).cuda.get_current_stream().synchronize()  # threads may use other streams
            for file, array, offset in place_rows(split, start, rows):
                wanted = digests if offset == 0 and file.name in digested else None
                waiting.append(pool.submit(_copy_out, file, array, offset, wanted))
        for done in waiting:
            done.result()
    return digests


def _copy_out(file: Path, array: Any, offset: int, digests: FileDigests | None) -> None:
    import cupyx

    content = array_module(array).ascontiguousarray(array).reshape(-1).view(np.uint8)
    stage = cupyx.empty_pinned(min(_STAGE_BYTES, len(content)), np.uint8)
    digest = blake3()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        for start in range(0, len(content), _STAGE_BYTES):
            block = content[start : start + _STAGE_BYTES]
            here = block.get(out=stage[: len(block)])
            write_at(descriptor, here, offset + start)
            if digests is not None:
                digest.update(here)
    finally:
        os.close(descriptor)
    if digests is not None:
        digests[file] = len(content), digest.digest()
    begin_sync_beside(file)  # the disk is much slower than the copies
