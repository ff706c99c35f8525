"""Latency histograms that can be added and whose quantiles have a relative error of at most 1%, as DDSketch's. Pure.

A sketch is two arrays: the bins that occur, in rising order, and how many latencies each has. In bytes it takes one to
three for each bin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

ERROR: Final = 0.01
GAMMA: Final = (1 + ERROR) / (1 - ERROR)
_WIDTH: Final = math.log(GAMMA)
_HIGHEST: Final = 1_100  # an hour in microseconds
BINS: Final = _HIGHEST + 1

Array = npt.NDArray[Any]

_COUNTS: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


@dataclass(frozen=True, slots=True)
class Sketch:
    bins: Array  # int64, rising, no repetition
    counts: Array  # int64, above 0

    @property
    def total(self) -> int:
        return int(self.counts.sum())


EMPTY: Final = Sketch(np.zeros(0, np.int64), np.zeros(0, np.int64))


def bins_of(us: Array) -> Array:
    """Returns the bin of each latency in microseconds. Bin 0 has all up to one microsecond."""
    with np.errstate(divide="ignore"):
        place = np.ceil(np.log(np.maximum(us, 1.0)) / _WIDTH)
    found: Array = np.clip(place, 0, _HIGHEST).astype(np.int64)
    return found


def value_us(bins: Array) -> Array:
    """Returns a latency within 1% of all that are in the bin."""
    values: Array = 2.0 * np.exp(bins * _WIDTH) / (GAMMA + 1.0)
    return values


def merge(sketches: Sequence[Sketch]) -> Sketch:
    if len(sketches) == 1:
        return sketches[0]
    counts = np.zeros(BINS, np.int64)
    for sketch in sketches:
        counts[sketch.bins] += sketch.counts
    bins = np.flatnonzero(counts)
    return Sketch(bins, counts[bins])


def quantiles_ms(sketch: Sketch, quantiles: Sequence[float]) -> list[float | None]:
    """Returns quantiles in milliseconds; None when the sketch is empty. Each is of a latency that occurred: p99 is
    never better than what the slowest hundredth had."""
    if not sketch.bins.size:
        return [None for _ in quantiles]
    up_to = np.cumsum(sketch.counts)
    wanted = np.asarray(quantiles) * (up_to[-1] - 1)
    places = np.searchsorted(up_to, np.ceil(wanted - 1e-9), side="right").clip(max=up_to.size - 1)
    return [float(value) / 1000.0 for value in value_us(sketch.bins[places])]


def pack(sketch: Sketch) -> bytes:
    """Two bytes: widths of gaps and counts; two bytes: the first bin; then the gaps between bins, then the counts."""
    if not sketch.bins.size:
        return b""
    gaps, first = np.diff(sketch.bins), int(sketch.bins[0])
    gap_width = 1 if not gaps.size or gaps.max() < 256 else 2
    highest = int(sketch.counts.max())
    count_width = next(width for width in (1, 2, 4, 8) if highest < 256**width)
    head = bytes((gap_width, count_width)) + first.to_bytes(2, "little")
    return (
        head
        + gaps.astype(_COUNTS[gap_width]).tobytes()
        + sketch.counts.astype(_COUNTS[count_width]).tobytes()
    )


def unpack(data: bytes) -> Sketch:
    if not data:
        return EMPTY
    gap_width, count_width, first = data[0], data[1], int.from_bytes(data[2:4], "little")
    bins = (len(data) - 4 + gap_width) // (gap_width + count_width)
    middle = 4 + (bins - 1) * gap_width
    gaps = np.frombuffer(data[4:middle], _COUNTS[gap_width]).astype(np.int64)
    counts = np.frombuffer(data[middle:], _COUNTS[count_width]).astype(np.int64)
    return Sketch(np.concatenate(([first], first + np.cumsum(gaps))).astype(np.int64), counts)
