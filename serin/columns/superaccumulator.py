"""Arrays of integers of any size, in digits of 32 bits: exact sums that are merged in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from serin.columns.limbs import DIGIT_BITS, Limb

Int64 = npt.NDArray[np.int64]
_MASK = 2**DIGIT_BITS - 1
_HALF = 2 ** (DIGIT_BITS - 1)


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
