"""Splits float32 and int64 arrays into limbs, integers whose sums are exact: the same on the host and on a GPU.

A float32 has 24 significant bits and its square 48, so float64 represents both, and every part of their bits, without
rounding. One limb represents a whole array where its exponents are close enough together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from serin.columns.column import array_module

SMALLEST = -149  # every finite float32 is an integer times 2^-149
DIGIT_BITS = 32
_MASK = 2**DIGIT_BITS - 1
_FRACTION_BITS = 23
_MANTISSA_BITS = _FRACTION_BITS + 1
_INFINITE = 255 << _FRACTION_BITS  # as a bit pattern; that of NaN is larger
_BIAS_OF_FLOAT64, _FRACTION_BITS_OF_FLOAT64 = 1023, 52
BLOCK = 2**14  # values that stay in the processor's cache from one operation to the next


class Limb(NamedTuple):
    """`digits` * 2^`exponent`, a part of each value. Integers, as int64 or float64, where the values are."""

    exponent: int
    digits: Any


class Span(NamedTuple):
    """All values are integers of at most `bits` bits, times 2^exponent."""

    exponent: int
    bits: int
    finite: bool


def limbs(values: Any, *, most_bits: int = DIGIT_BITS) -> list[Limb]:
    """The values, float32 or int64, as limbs that add up to them; NaN and infinite ones count as 0.

    One limb of at most `most_bits` bits (62 or fewer) where that is enough, else several of 32 bits.
    """
    span = span_of(values)
    if values.dtype == np.float32:
        several = span.bits > most_bits
        return _in_blocks(values, lambda block: _cut(_to_float64(block, span), span, several=several))
    if span.bits <= most_bits:
        return [Limb(0, values)]
    return _in_blocks(values, lambda block: _halves(block, 0))


def square_limbs(values: Any) -> list[Limb]:
    """The same of the squares, in limbs of 32 bits."""
    span = span_of(values)
    if values.dtype == np.float32:
        squared = Span(2 * span.exponent, 2 * span.bits, span.finite)
        return _in_blocks(
            values, lambda block: _cut(_squared(_to_float64(block, span)), squared, several=True)
        )
    if span.bits < DIGIT_BITS:
        return _in_blocks(values, lambda block: _halves(block * block, 0))
    return _in_blocks(values, _squares_of_ints)


def _in_blocks(values: Any, make: Callable[[Any], list[Limb]]) -> list[Limb]:
    """Applies `make` to the values; on the host a block at a time."""
    if array_module(values) is not np or len(values) <= BLOCK:
        return make(values)
    made: list[Limb] = []
    for start in range(0, len(values), BLOCK):
        block = slice(start, start + BLOCK)
        parts = make(values[block])
        if not made:
            made = [Limb(part.exponent, np.empty(len(values), part.digits.dtype)) for part in parts]
        for part, whole in zip(parts, made, strict=True):
            whole.digits[block] = part.digits
    return made


def span_of(values: Any) -> Span:
    """The span of int64 values, or of float32 values without those that are not finite."""
    if not len(values):
        return Span(0, 0, True)
    if values.dtype != np.float32:
        return Span(0, max(int(values.max()), -int(values.min())).bit_length(), True)
    first, last, finite = _INFINITE, 0, True
    rows = BLOCK if array_module(values) is np else len(values)
    for start in range(0, len(values), rows):
        sizes = _patterns(values[start : start + rows]) & np.uint32(2**31 - 1)
        largest = int(sizes.max())
        if largest >= _INFINITE:
            sizes = sizes * (sizes < np.uint32(_INFINITE))
            largest, finite = int(sizes.max()), False
        last = max(last, largest)
        first = min(first, int((sizes - np.uint32(1)).min()) + 1)  # 0 wraps, so that it is never the least
    if last == 0:
        return Span(0, 0, finite)
    lowest, highest = (max(pattern >> _FRACTION_BITS, 1) - 1 for pattern in (first, last))
    return Span(SMALLEST + lowest, _MANTISSA_BITS + highest - lowest, finite)


def _to_float64(values: Any, span: Span) -> Any:
    """The integers of a span, in float64."""
    xp = array_module(values)
    if xp is np:
        whole = np.multiply(values, 2.0**-span.exponent, dtype=np.float64)
        return whole if span.finite else np.where(np.isfinite(whole), whole, 0.0)
    # A GPU treats subnormal float32 as 0, so that only their bit patterns can be used there.
    patterns = _patterns(values)
    field = (patterns >> np.uint32(_FRACTION_BITS)) & np.uint32(255)
    implicit = (field != 0).astype(np.uint32)  # a subnormal number lacks it, and has the exponent of field 1
    mantissa = (patterns & np.uint32(2**_FRACTION_BITS - 1)) | (implicit << np.uint32(_FRACTION_BITS))
    mantissa = xp.where(field == np.uint32(255), np.uint32(0), mantissa).astype(np.float64)
    power = (field - implicit).astype(np.int64) + (_BIAS_OF_FLOAT64 + SMALLEST - span.exponent)
    whole = mantissa * (power << _FRACTION_BITS_OF_FLOAT64).view(np.float64)
    return xp.where(patterns >> np.uint32(31) != 0, -whole, whole)


def _squared(whole: Any) -> Any:
    return np.multiply(whole, whole, out=whole)


def _patterns(values: Any) -> Any:
    return array_module(values).ascontiguousarray(values).view(np.uint32)


def _cut(whole: Any, span: Span, *, several: bool) -> list[Limb]:
    """Integers in digits, the sign in each of them: a difference has no bit that was not there. Changes `whole`."""
    found, part = [], np.empty_like(whole)
    for number in range((span.bits - 1) // DIGIT_BITS if several else 0, 0, -1):
        unit = 2.0 ** (DIGIT_BITS * number)
        digits = whole * (1 / unit)
        np.trunc(digits, out=digits)
        np.subtract(whole, np.multiply(digits, unit, out=part), out=whole)
        found.append(Limb(span.exponent + DIGIT_BITS * number, digits))
    return [*found, Limb(span.exponent, whole)]


def _halves(values: Any, exponent: int) -> list[Limb]:
    return [Limb(exponent, values & _MASK), Limb(exponent + DIGIT_BITS, values >> DIGIT_BITS)]


def _squares_of_ints(values: Any) -> list[Limb]:
    low, high = values & _MASK, values >> DIGIT_BITS
    lowest = low.view(np.uint64) * low.view(np.uint64)
    return [
        Limb(0, (lowest & np.uint64(_MASK)).view(np.int64)),
        Limb(DIGIT_BITS, (lowest >> np.uint64(DIGIT_BITS)).view(np.int64)),
        *_halves(low * high, DIGIT_BITS + 1),
        *_halves(high * high, 2 * DIGIT_BITS),
    ]
