"""The GPU as the engines see it: which columns go there, how they come back, and what is done when it is full."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from serin.features.column import Column
from serin.hardware import inventory
from serin.spec.features import FeatureSpec
from serin.spec.parse_steps import STEPS

F = TypeVar("F", bound=Callable[..., Any])
_rescued: list[int] = []  # appending is safe from any thread
# Steps whose work per row is the same on a GPU: all of ours. A column with one's own step stays on the host.
GPU_STEPS = frozenset(STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    count: int
    memory_bytes: int  # of all of them together


def usable_gpus() -> Gpus:
    """The GPUs the ETL could use: those the driver shows, when cupy is installed."""
    found = inventory() if importlib.util.find_spec("cupy") is not None else ()
    return Gpus(count=len(found), memory_bytes=sum(device.memory_bytes for device in found))


def gpu_columns(features: Sequence[FeatureSpec]) -> frozenset[str]:
    """The columns of which every feature can be made on a GPU."""
    fit: set[str] = set()
    unfit: set[str] = set()
    for feature in features:
        able = all(step.name in GPU_STEPS for step in feature.steps)
        (fit if able else unfit).update(feature.columns)
    return frozenset(fit - unfit)


def free_gpu_bytes() -> int:
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[0])


@contextmanager
def memory_pool() -> Iterator[None]:
    """One pool for cupy and cuDF while the block runs; given back after it, since torch must not share it."""
    import cupy

    if importlib.util.find_spec("rmm") is None:  # cupy's own pool then
        try:
            yield
        finally:
            cupy.get_default_memory_pool().free_all_blocks()
        return
    import rmm
    from rmm.allocators.cupy import rmm_cupy_allocator

    before, allocator = rmm.mr.get_current_device_resource(), cupy.cuda.get_allocator()
    rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource())  # takes what is used, no more
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    try:
        yield
    finally:
        gc.collect()  # arrays in cycles would keep the pool
        cupy.cuda.set_allocator(allocator)
        rmm.mr.set_current_device_resource(before)


def to_gpu(column: Column) -> Column:
    import cupy

    return replace(column, values=cupy.asarray(column.values))


class HostColumns(Mapping[str, Column]):
    """Columns of which each comes from the GPU when it is asked for."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> Column:
        return self._columns[name].on_host()

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def to_host(value: Any) -> Any:
    """A piece whose columns are found in this machine's memory."""
    return replace(value, columns=HostColumns(value.columns))


def gpu_aware(function: F) -> F:
    """Marks a function that works on columns wherever they are; all others are given the host's."""
    function.on_gpu = True  # type: ignore[attr-defined]
    return function


def download(array: Any) -> Any:
    """A GPU's array as one of numpy, through memory that the GPU can write to by itself."""
    if isinstance(array, np.ndarray):
        return array
    import cupyx

    return array.get(out=cupyx.empty_pinned(array.shape, array.dtype))


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A function of a piece; what is not aware of GPUs, and what a full GPU cannot do, the host does."""

    function: Callable[..., Any]

    def __call__(self, value: Any, *rest: Any) -> Any:
        if getattr(self.function, "on_gpu", False):
            try:
                return self.function(value, *rest)
            except MemoryError:
                count_rescue()
        return self.function(to_host(value), *rest)


def count_rescue() -> None:
    _rescued.append(1)


def take_rescues() -> int:
    """How many pieces were worked on by the host since the last call, because the GPU was full."""
    count = len(_rescued)
    del _rescued[:count]
    return count
