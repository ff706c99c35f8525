"""Mean 0 and standard deviation 1 on the training split: (x - mean) / deviation in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from serin.features.distribution import Distribution
from serin.features.number_requests import FIXED_BITS, FixedPointSums, Sums
from serin.features.requests import Fit
from serin.features.scaling import Scaling, scale_of


@dataclass(frozen=True, slots=True)
class Normalize(Scaling):
    """Shift is the mean, scale the standard deviation. A column with one value has deviation 1."""

    name: ClassVar[str] = "normalize"

    @classmethod
    def fit(cls, data: Distribution) -> Fit[Distribution]:
        exponent = data.exponent()
        sums: Sums = yield FixedPointSums(data.numbers, exponent)
        if sums.count == 0:  # what the steps made is infinite throughout
            return data.after(cls(0.0, 1.0))
        unit = Fraction(2) ** (exponent - FIXED_BITS)
        mean = Fraction(sums.total, sums.count)
        variance = Fraction(sums.squares, sums.count) - mean * mean
        deviation = scale_of(math.sqrt(float(variance * unit * unit)))
        return data.after(cls(float(np.float32(float(mean * unit))) + 0.0, deviation))
