"""Latency histograms with bins 4% wide: small to store and exact to add. Pure.

The bins are the last axis of every array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from serin.evidence.e_process import Array, split_evidence

WIDTH: Final = 0.04  # of a bin, in the logarithm
BINS: Final = 400
_LOWEST: Final = math.log(10.0)  # microseconds; the last bin begins at about 85 s
_SURE: Final = 40.0  # evidence that a quantile is elsewhere: one time in twenty, both sides together


def bins_of(us: Array, *, margin: float = 0.0, tolerance_us: float = 0.0) -> Array:
    """Returns the bin of each latency after subtracting `margin` and `tolerance_us`. An infinite latency is in the last
    bin.

    The rest is beyond x exactly when the latency is beyond max((1 + margin) x, x + tolerance_us), for every x at once.
    So the allowed slowdown can be subtracted before x is known.
    """
    us = np.asarray(us, dtype=np.float64)
    if tolerance_us:
        us = np.minimum(us, (np.maximum(us, tolerance_us) - tolerance_us) * (1 + margin))
    with np.errstate(divide="ignore"):
        place = (np.log(us) - (_LOWEST + math.log1p(margin))) / WIDTH
    found: Array = np.clip(place, 0, BINS - 1).astype(np.int64)
    return found


def latency_name(quantile: float) -> str:
    """The name of a latency quantile, such as p95."""
    return f"p{quantile * 100:g}"


def count(bins: Array) -> Array:
    return np.bincount(bins, minlength=BINS)


def quantile_bins(counts: Array, quantiles: Sequence[float]) -> Array:
    """Returns for each quantile the first bin that reaches that share of the counts; shape (..., quantiles)."""
    up_to = np.cumsum(counts, axis=-1)
    wanted = up_to[..., -1:] * np.asarray(quantiles)
    found: Array = (up_to[..., None, :] < wanted[..., :, None] * (1 - 1e-12)).sum(axis=-1)
    return found.clip(max=counts.shape[-1] - 1)


def slower_than(counts: Array, bins: Array) -> Array:
    """Counts the latencies beyond each of `bins`; shape of `bins`."""
    up_to = np.cumsum(counts, axis=-1)
    beyond: Array = up_to[..., -1:] - np.take_along_axis(up_to, bins, axis=-1)
    return beyond


def upper_us(bins: Array | int) -> Array:
    """Returns the upper end of each bin, in microseconds."""
    ends: Array = np.exp(_LOWEST + (np.asarray(bins) + 1.0) * WIDTH)
    return ends


def quantiles_us(counts: Array, quantiles: Sequence[float]) -> list[float | None]:
    """Returns the quantiles in microseconds, for display; None when nothing was counted."""
    if not counts.sum():
        return [None for _ in quantiles]
    return [float(end) for end in upper_us(quantile_bins(counts, quantiles))]


def bands_us(counts: Array, quantiles: Sequence[float]) -> list[tuple[float, float]]:
    """Returns a 95% confidence band for each quantile, valid at any time, for display. Infinite: not known yet.

    The bands hold while requests are independent and their latencies do not drift. That is not so in a rollout, where
    pauses and load move them together, so no decision may use these bands.
    """
    up_to = np.cumsum(counts).astype(np.int64)
    requests = int(up_to[-1])
    bins = [int(found) for found in np.flatnonzero(np.diff(up_to, prepend=0))]
    bands = []
    for quantile in quantiles:
        low, high = 0.0, math.inf
        for place in bins:
            below = int(up_to[place])
            if split_evidence(below, requests, quantile) < _SURE:
                continue
            if below > quantile * requests:
                high = float(upper_us(place))
                break
            low = float(upper_us(place))
        bands.append((low, high))
    return bands
