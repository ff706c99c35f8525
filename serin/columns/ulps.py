"""Measures how far apart float32 values are, in units in the last place, to compare results of logarithms and sines."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


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
