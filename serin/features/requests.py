"""What a fit asks of the training rows. Each request is measured per partition and merged, exactly, in any order.

A fit is a generator: it yields requests, is sent the merged answers, and returns the fitted step. Whoever drives it
decides where the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.features.column import Column, array_module
from serin.features.steps import NumericStep

Counts = npt.NDArray[np.int64]
_BLOCK = 2**14  # rows that stay in the processor's cache from one operation to the next
FIXED_BITS = 31


class Request(Protocol):
    """Hashable, and small enough to be sent to every partition. It measures columns on a GPU when it has
    `on_gpu = True`; what it measured is on the host."""

    @property
    def column(self) -> str: ...

    def measure(self, column: Column) -> Any: ...

    def merge(self, left: Any, right: Any) -> Any: ...


T = TypeVar("T")
Fit: TypeAlias = Generator[Request, Any, T]
Answer: TypeAlias = Callable[[tuple[Request, ...]], Sequence[Any]]


def run_fits(fits: Sequence[Fit[T]], answer: Answer) -> list[T]:
    """Drives all fits together, so that one pass over the rows answers what all of them ask at that moment."""
    results: dict[int, T] = {}
    waiting: dict[int, Request] = {}
    known: dict[Request, Any] = {}

    def advance(index: int, value: Any) -> None:
        try:
            waiting[index] = fits[index].send(value)
        except StopIteration as end:
            results[index] = end.value

    for index in range(len(fits)):
        advance(index, None)
    while waiting:
        asked, waiting = waiting, {}
        new = tuple(request for request in dict.fromkeys(asked.values()) if request not in known)
        known.update(zip(new, answer(new), strict=True) if new else ())
        for index, request in asked.items():
            advance(index, known[request])
    return [results[index] for index in range(len(fits))]


@dataclass(frozen=True, slots=True)
class HighBits:
    """How many rows have which upper 16 bits in their float32 form. int64[65536], by the bits as they are."""

    on_gpu: ClassVar[bool] = True
    column: str

    def measure(self, column: Column) -> Counts:
        if array_module(column.values) is not np:
            return count_codes(_bits(column) >> np.uint32(16), 65536)
        counts = np.zeros(65536, np.int64)
        for block in column.blocks(16 * _BLOCK):
            counts += np.bincount(_halves(block)[1::2], minlength=65536)
        return counts

    def merge(self, left: Counts, right: Counts) -> Counts:
        return left + right


@dataclass(frozen=True, slots=True)
class LowBits:
    """Among the rows with these upper 16 bits, how many have which lower 16 bits. int64[65536]."""

    on_gpu: ClassVar[bool] = True
    column: str
    upper: int

    def measure(self, column: Column) -> Counts:
        if array_module(column.values) is not np:
            bits = _bits(column)
            chosen = bits[(bits >> np.uint32(16)) == np.uint32(self.upper)]
            return count_codes(chosen & np.uint32(0xFFFF), 65536)
        counts = np.zeros(65536, np.int64)
        for block in column.blocks(16 * _BLOCK):
            halves = _halves(block)
            chosen = halves[0::2][halves[1::2] == self.upper]
            if len(chosen):
                counts += np.bincount(chosen, minlength=65536)
        return counts

    def merge(self, left: Counts, right: Counts) -> Counts:
        return left + right


@dataclass(frozen=True, slots=True)
class Sums:
    """The sum of values and of squares, as whole numbers: a sum of quantised values does not depend on its order."""

    count: int
    total: int
    squares: int


@dataclass(frozen=True, slots=True)
class FixedPointSums:
    """Sums of the column after `steps`, in units of 2^(exponent - 31), where every finite |value| <= 2^exponent."""

    on_gpu: ClassVar[bool] = True
    column: str
    steps: tuple[NumericStep, ...]
    exponent: int

    def measure(self, column: Column) -> Sums:
        count, total, squares = 0, 0, 0
        scale = 2.0 ** (FIXED_BITS - self.exponent)
        if array_module(column.values) is not np:
            return self._measure_on_gpu(column, scale)
        buffers = np.empty((3, _BLOCK))
        for block in column.blocks(_BLOCK):
            values = block.floats()
            for step in self.steps:
                values = step.transform(values)
            finite = np.isfinite(values)
            if not finite.all():
                values = values[finite]
            # All that follows is exact: whole numbers below 2^53 in float64, whatever the order of addition.
            fixed, high, low = buffers[:, : len(values)]
            np.rint(np.multiply(values, scale, out=fixed, dtype=np.float64), out=fixed)
            np.floor(np.multiply(fixed, 2.0**-16, out=high), out=high)
            np.subtract(fixed, np.multiply(high, 2.0**16, out=low), out=low)
            count += len(values)
            total += int(fixed.sum())
            squares += (_dot(high, high) << 32) + (_dot(high, low) << 17) + _dot(low, low)
        return Sums(count, total, squares)

    def _measure_on_gpu(self, column: Column, scale: float) -> Sums:
        """The same sums in whole numbers: float64 atomics would be exact too, but int64 needs no argument."""
        values = column.floats()
        for step in self.steps:
            values = step.transform(values)
        finite = np.isfinite(values)
        scaled = np.rint(values.astype(np.float64) * scale)
        fixed = np.where(finite, scaled, 0.0).astype(np.int64)
        high, low = fixed >> 16, fixed & 0xFFFF
        parts = [finite, fixed, high * high, high * low, low * low]
        count, total, upper, mixed, lower = (int(part.sum(dtype=np.int64)) for part in parts)
        return Sums(count, total, (upper << 32) + (mixed << 17) + lower)

    def merge(self, left: Sums, right: Sums) -> Sums:
        return Sums(left.count + right.count, left.total + right.total, left.squares + right.squares)


@dataclass(frozen=True, slots=True, eq=False)
class ValueTable:
    """Distinct values (strings or int64, none null) and how often each occurs; `nulls` apart."""

    values: pa.Array
    counts: Counts
    nulls: int


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """How often each value occurs. The order of values is that of no promise: sort before use."""

    on_gpu: ClassVar[bool] = True
    column: str

    def measure(self, column: Column) -> ValueTable:
        xp = array_module(column.values)
        if column.dictionary is not None:
            counts = count_codes(column.values + 1, len(column.dictionary) + 1)
            seen = np.flatnonzero(counts[1:])
            return ValueTable(column.dictionary.take(pa.array(seen)), counts[1:][seen], int(counts[0]))
        present = column.values[~column.null].astype(np.int64, copy=False)
        if xp is not np:
            values, seen = xp.unique(present, return_counts=True)
            return ValueTable(pa.array(values.get()), seen.get().astype(np.int64), len(column) - len(present))
        table = pc.value_counts(pa.array(present))
        counts = np.asarray(table.field("counts").to_numpy()).astype(np.int64)
        return ValueTable(table.field("values"), counts, len(column) - len(present))

    def merge(self, left: ValueTable, right: ValueTable) -> ValueTable:
        encoded = pa.concat_arrays([left.values, right.values]).dictionary_encode()
        counts = np.zeros(len(encoded.dictionary), np.int64)
        np.add.at(counts, encoded.indices.to_numpy(), np.concatenate([left.counts, right.counts]))
        return ValueTable(encoded.dictionary, counts, left.nulls + right.nulls)


def count_codes(codes: Any, size: int) -> Counts:
    """How many of the codes (0 .. size - 1) are which; on the host, wherever the codes are."""
    counts = array_module(codes).bincount(codes, minlength=size)
    return np.asarray(counts if isinstance(counts, np.ndarray) else counts.get()).astype(np.int64)


def _bits(column: Column) -> Any:
    """The float32 form of each value, as a whole number."""
    return array_module(column.values).ascontiguousarray(column.floats()).view(np.uint32)


def _halves(column: Column) -> npt.NDArray[np.uint16]:
    """The lower and the upper 16 bits of each float32, in turn."""
    return np.ascontiguousarray(column.floats()).view(np.uint16)


def _dot(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> int:
    return int(
        np.einsum("i,i->", left, right)
    )  # without the threads of a BLAS, which cost more than they bring here
