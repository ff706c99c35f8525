"""Counts the requests of a batch of log lines by model, release, arm and minute, with histograms of their latencies,
which can be added and whose quantiles have a relative error of at most 1%, as DDSketch's. Pure.

A sketch is two arrays: the bins that occur, in rising order, and how many latencies each has. In bytes it takes one to
three for each bin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from serin.formats.serving.request import CLIENT_GONE, SERVER_FAULTS, Request

MINUTE_S: Final = 60
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


LimitMs = Callable[[str, str], float | None]  # of a model and release: what its spec promises


class Series(NamedTuple):
    model: str
    release: str
    arm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """`errors`: requests whose client got a server error or nothing. `saved`: the release failed and a retry elsewhere
    saved the client. `slow`: answered later than promised, or not yet when the client went away. `refused`: the client
    was wrong. `gone`: the client went away before it had waited as long as promised, so nobody knows what it would have
    got: such a request is neither good nor bad."""

    requests: int
    errors: int
    saved: int
    slow: int
    refused: int
    gone: int = 0
    latency: Sketch


def tally(requests: Sequence[Request], limit_ms: LimitMs) -> Mapping[tuple[Series, int], Tally]:
    """Returns the counts of each series and minute (its start, seconds since 1970). Pure. Nothing loops over requests
    in Python but the lookup of their names."""
    if not requests:
        return {}
    columns = dict(zip(Request._fields, zip(*requests, strict=True), strict=True))
    known: dict[Series, int] = {}
    names = zip(columns["model"], columns["release"], columns["arm"], strict=True)
    series = np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)  # type: ignore[arg-type]
    us = np.array(columns["us"], dtype=np.float64)  # None becomes NaN
    marks = _marks(columns, us, series, [limit_ms(name[0], name[1]) for name in known])
    minutes = np.array(columns["t"], dtype=np.float64).astype(np.int64) // MINUTE_S
    first = int(minutes.min())
    groups, group = np.unique(
        series * (int(minutes.max()) - first + 1) + minutes - first, return_inverse=True
    )
    sums = {name: np.bincount(group, weights=mark).astype(np.int64) for name, mark in marks.items()}
    sketches = _sketches(group, us, groups.size)
    span, listed = int(minutes.max()) - first + 1, [Series(*name) for name in known]
    return {
        (listed[int(code) // span], (first + int(code) % span) * MINUTE_S): Tally(
            latency=sketches[place], **{name: int(values[place]) for name, values in sums.items()}
        )
        for place, code in enumerate(groups)
    }


def _marks(
    columns: Mapping[str, tuple[object, ...]], us: Array, series: Array, limits_ms: Sequence[float | None]
) -> dict[str, Array]:
    code = np.array(columns["code"], dtype=np.int64)
    grpc = np.array(columns["grpc"], dtype=np.float64)
    left = [each != "-" and not CLIENT_GONE.isdisjoint(str(each).split(",")) for each in columns["flags"]]
    cancelled = np.array(left, dtype=bool)
    errors = (code >= 500) | np.isin(grpc, list(SERVER_FAULTS)) | ((code == 0) & ~cancelled)
    gone = cancelled & np.isnan(us) & ~errors
    ms, received_ms = (np.array(columns[name], dtype=np.float64) for name in ("ms", "received_ms"))
    waited_us = np.where(gone, (ms - received_ms) * 1000.0, us)  # NaN: the request never came whole
    limit_us = np.array([np.inf if limit is None else limit * 1000.0 for limit in limits_ms])[series]
    refused = ~errors & (((code >= 400) & (code < 500)) | ~(np.isnan(grpc) | np.isin(grpc, (0, 1))))
    return {
        "requests": np.ones(len(us)),
        "errors": errors,
        "saved": ~errors & (np.array(columns["attempts"], dtype=np.int64) > 1),
        "slow": ~errors & (waited_us > limit_us),
        "refused": refused,
        "gone": gone & ~(waited_us > limit_us),
    }


def _sketches(group: Array, us: Array, groups: int) -> list[Sketch]:
    answered = ~np.isnan(us)
    cells, counts = np.unique(group[answered] * BINS + bins_of(us[answered]), return_counts=True)
    ends = np.searchsorted(cells, np.arange(1, groups) * BINS)
    bins = np.split(cells % BINS, ends)
    return [Sketch(*pair) for pair in zip(bins, np.split(counts, ends), strict=True)]
