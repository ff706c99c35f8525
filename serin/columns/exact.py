"""Exact arithmetic on float32 and int64 arrays: the same on the host and on a GPU, in any order.

Values are split into limbs, integers whose sums are exact. A float32 has 24 significant bits and its square 48, so
float64 represents both, and every part of their bits, without rounding. One limb represents a whole array where its
exponents are close enough together. Limbs are added up in a superaccumulator: integers of any size, in digits of 32
bits. The float32 nearest to such a number is found by one rounding, ties to even, subnormal results included: a
quotient or a root is cut off after at least 26 bits, and its last bit is set when anything was cut off (rounding to
odd). What is rounded to float32 after that is what the exact number would be rounded to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from serin.columns.column import array_module

SMALLEST = -149  # every finite float32 is an integer times 2^-149
DIGIT_BITS = 32
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
_KEPT_BITS = 40
_FLOAT64_BITS = 53
_MASK = 2**DIGIT_BITS - 1
_HALF = 2 ** (DIGIT_BITS - 1)
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


@dataclass(frozen=True, slots=True, eq=False)
class Superaccumulator:
    """The sum over k of digits[k] * 2^(32 * (base + k)). The last digit carries the sign; all others are in
    0 .. 2^32 - 1."""

    digits: Int64  # [n, ...]
    base: int

    @classmethod
    def of(cls, parts: Sequence[Limb], shape: tuple[int, ...]) -> Self:
        """What parts on the host add up to; each of them any int64 of this shape."""
        if not parts:
            return cls(np.zeros((1, *shape), np.int64), 0)
        base = min(part.exponent for part in parts) // DIGIT_BITS
        last = max(part.exponent for part in parts) // DIGIT_BITS
        digits = np.zeros((last - base + 3, *shape), np.int64)
        for part in parts:
            place, shift = divmod(part.exponent, DIGIT_BITS)
            lower = (part.digits & _MASK) << shift
            upper = ((part.digits >> DIGIT_BITS) << shift) + (lower >> DIGIT_BITS)
            digits[place - base] += lower & _MASK
            digits[place - base + 1] += upper & _MASK
            digits[place - base + 2] += upper >> DIGIT_BITS
        return cls(_shortened(_normal(digits)), base)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.digits.shape[1:]

    @property
    def exponent(self) -> int:
        """The exponent of the first digit's unit."""
        return DIGIT_BITS * self.base

    def __getitem__(self, place: Any) -> Self:
        return type(self)(
            self.digits[:, *place] if isinstance(place, tuple) else self.digits[:, place], self.base
        )

    def __add__(self, other: Self) -> Self:
        base = min(self.base, other.base)
        return type(self)(_normal(self._from(base, other) + other._from(base, self)), base)

    def __sub__(self, other: Self) -> Self:
        base = min(self.base, other.base)
        return type(self)(_normal(self._from(base, other) - other._from(base, self)), base)

    def sum(self, axis: int) -> Self:
        """The sums over an axis of `shape`, which may be 2^31 long."""
        return type(self)(_normal(self.digits.sum(axis=axis + 1)), self.base)

    def placed(self, rows: Int64, size: int) -> Self:
        """The same in an array whose first axis has this size, at these rows; zeros elsewhere."""
        digits = np.zeros((len(self.digits), size, *self.shape[1:]), np.int64)
        digits[:, rows] = self.digits
        return type(self)(digits, self.base)

    def integers(self, exponent: int) -> npt.NDArray[Any]:
        """Python's integers, in units of 2^exponent, which is at most the unit of the first digit."""
        whole = self.digits[-1].astype(object)
        for digits in self.digits[-2::-1]:
            whole = (whole << DIGIT_BITS) + digits.astype(object)
        return np.asarray(whole << (self.exponent - exponent), object)

    def to_int64(self) -> Int64:
        """The integers themselves, whose unit is 1; OverflowError when one of them does not fit."""
        assert self.base == 0, self.base
        digits = _shortened(self.digits)
        if len(digits) > 2:
            raise OverflowError("more than 64 bits")
        return np.asarray(digits[0] if len(digits) == 1 else (digits[1] << DIGIT_BITS) | digits[0])

    def floats(self) -> npt.NDArray[np.float64]:
        """Within a few units of the last place of float64. The first digits are added without rounding, so that none
        that cancel are lost."""
        whole = self.digits[-1].astype(np.float64)
        for digits in self.digits[-2::-1]:
            whole = whole * 2.0**DIGIT_BITS + digits
        return np.asarray(np.ldexp(whole, self.exponent))

    def magnitude(self) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """The digits of the absolute value, none negative, and whether it has to be negated."""
        negative = self.digits[-1] < 0
        return _normal(np.where(negative, -self.digits, self.digits)), negative

    def _from(self, base: int, other: Self) -> Int64:
        """The digits from `base` on, as many as this and the other one together need."""
        size = max(each.base + len(each.digits) for each in (self, other)) - base
        digits = np.zeros((size, *self.shape), np.int64)
        digits[self.base - base : self.base - base + len(self.digits)] = self.digits
        return digits


def _normal(digits: Int64) -> Int64:
    """Carries the excess of a digit to the next one; adds a last digit where needed."""
    digits = digits.copy()
    for place in range(len(digits) - 1):
        digits[place + 1] += digits[place] >> DIGIT_BITS
        digits[place] &= _MASK
    while digits.size and (digits[-1].min() < -_HALF or digits[-1].max() >= _HALF):
        digits = np.concatenate([digits[:-1], digits[-1:] & _MASK, digits[-1:] >> DIGIT_BITS])
    return digits


def _shortened(digits: Int64) -> Int64:
    """Without last digits that repeat the sign of the one before."""
    while len(digits) > 1 and digits.size and (digits[-1] == -(digits[-2] >= _HALF).astype(np.int64)).all():
        signed = digits[-2] - ((digits[-2] >= _HALF).astype(np.int64) << DIGIT_BITS)
        digits = np.concatenate([digits[:-2], signed[None]])
    return digits


def nearest_ratio(numerator: int, denominator: int, exponent: int = 0) -> float:
    """numerator / denominator * 2^exponent as float32; infinite when that is beyond its range; never -0."""
    if numerator < 0:
        return 0.0 - nearest_ratio(-numerator, denominator, exponent)
    shift = _KEPT_BITS - numerator.bit_length() + denominator.bit_length()
    whole, rest = divmod(numerator << max(shift, 0), denominator << max(-shift, 0))
    return _to_float32(whole, rest != 0, exponent - shift)


def nearest_root(numerator: int, denominator: int, exponent: int = 0) -> float:
    """The square root of numerator / denominator, times 2^exponent, as float32."""
    shift = _KEPT_BITS - (numerator.bit_length() - denominator.bit_length()) // 2
    whole, rest = divmod(numerator << max(2 * shift, 0), denominator << max(-2 * shift, 0))
    root = math.isqrt(whole)
    return _to_float32(root, rest != 0 or root * root != whole, exponent - shift)


def _to_float32(whole: int, more: bool, exponent: int) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(math.ldexp(whole | more, exponent)))


def nearest_ratios(sums: Sequence[Limb], counts: Int64) -> npt.NDArray[np.float32]:
    """What the limbs add up to, divided by counts from 1 to 2^32 - 1, as float32; never -0."""
    if len(sums) == 1:
        (only,) = sums
        negative = only.digits < 0
        leading = np.abs(only.digits).view(np.uint64)
        shift = _free_bits(leading)
        leading, more, exponent = (
            leading << shift,
            np.zeros_like(negative),
            only.exponent - shift.astype(np.int64),
        )
    else:
        leading, more, exponent, negative = _leading_bits(Superaccumulator.of(sums, counts.shape))
    divisor = counts.astype(np.uint64)
    whole, rest = np.divmod(leading, divisor)
    cut = np.where(whole >> np.uint64(_FLOAT64_BITS) != 0, np.uint64(64 - _FLOAT64_BITS), np.uint64(0))
    more = more | (rest != 0) | (whole & ((np.uint64(1) << cut) - np.uint64(1)) != 0)
    odd = ((whole >> cut) | more.astype(np.uint64)).astype(np.float64)
    with np.errstate(over="ignore"):
        made = np.ldexp(odd, exponent + cut.astype(np.int64)).astype(np.float32)
    return np.asarray(np.where(negative, -made, made) + np.float32(0))


def _leading_bits(sums: Superaccumulator) -> tuple[UInt64, Bools, Int64, Bools]:
    """The first 63 or 64 bits of each magnitude, whether there are more, the exponent of the last bit, the sign."""
    digits, negative = sums.magnitude()
    digits = np.concatenate([np.zeros((2, *sums.shape), np.int64), digits])
    used = digits != 0
    place = np.maximum(len(digits) - 1 - np.argmax(used[::-1], axis=0), 2)
    first, second, third = (
        np.take_along_axis(digits, (place - back)[None], axis=0)[0].astype(np.uint64) for back in range(3)
    )
    width = np.uint64(DIGIT_BITS)
    leading = (first << width) | second
    shift = np.minimum(_free_bits(leading), width)  # only 0 has as many
    below = width - shift
    more = third & ((np.uint64(1) << below) - np.uint64(1)) != 0
    further = np.logical_or.accumulate(used, axis=0)  # at this place or below
    more |= np.take_along_axis(further, np.maximum(place - 3, 0)[None], axis=0)[0]
    leading = (leading << shift) | (third >> below)
    exponent = DIGIT_BITS * (sums.base + place - 3) - shift.astype(np.int64)
    return leading, more, exponent, negative


def _free_bits(values: UInt64) -> UInt64:
    """How many bits above the first one are 0, or one less than that."""
    bits = np.frexp(values.astype(np.float64))[1]
    return (64 - np.minimum(bits, 64)).astype(np.uint64)


def ulps_apart(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Counts the float32 values between each two, plus 1 if they differ; NaN equals NaN and is far from the rest."""
    apart: npt.NDArray[np.int64] = np.abs(_place(left) - _place(right))
    return np.where(
        np.isnan(left) | np.isnan(right), np.where(np.isnan(left) & np.isnan(right), 0, 2**32), apart
    )


def alike(
    left: npt.NDArray[np.float32], right: npt.NDArray[np.float32], slack: float
) -> npt.NDArray[np.bool_]:
    """Returns where two results of logarithms or sines agree: within 1 ulp, or within `slack`."""
    with np.errstate(invalid="ignore"):
        close: npt.NDArray[np.bool_] = np.abs(left.astype(np.float64) - right) <= slack
    return close | (ulps_apart(left, right) <= 1)


def _place(values: Any) -> npt.NDArray[np.int64]:
    """Returns the rank of each value among all float32 values; 0 and -0 share one."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
