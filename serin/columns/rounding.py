"""The float32 nearest to an exact number: one rounding, ties to even, subnormal results included. And how far apart two
float32 values are, in units in the last place.

A quotient or a root is cut off after at least 26 bits, and its last bit is set when anything was cut off (rounding to
odd). What is rounded to float32 after that is what the exact number would be rounded to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.columns.limbs import DIGIT_BITS, Limb, Superaccumulator

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
_KEPT_BITS = 40
_FLOAT64_BITS = 53


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
