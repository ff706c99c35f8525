"""drift.json of a bundle: what the training rows looked like, bin by bin, for the watch on live requests.

A series is the distribution of one column over its bins, in all rows or in one segment. Live counts are compared with
its shares in blocks of time (evidence/e_detector.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from serin.machine.documents import read_facts
from serin.machine.typed_json import Document

FILE = "drift.json"

Block = Literal["10 seconds", "minute", "hour", "day", "week"]
SHORTEST: Final[Block] = "10 seconds"
BLOCK_S: Final[Mapping[Block, float]] = {
    SHORTEST: 10.0,
    "minute": 60.0,
    "hour": 3600.0,
    "day": 86_400.0,
    "week": 604_800.0,
}
FEWEST_ROWS: Final[Mapping[Block, int]] = {SHORTEST: 50, "minute": 200, "hour": 200, "day": 200, "week": 200}
LEAST_TOLERANCE: Final = 0.01
YEAR_S: Final = 365.0 * 86_400

_PER_BIN: Final = ("share", "cap", "capped", "floor", "floored", "block_rows", "tolerance", "block")

UNSEEN: Final = "unseen values"  # the label of their bin

BinKind = Literal["number", "category", "timestamp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BinnedColumn:
    """How the values of a column are put into bins.

    `field`: its name in a table of captured rows; `element`: the place in a list, for an answer with several numbers.
    Bins of numbers: between neighbouring `edges`, below the first, above the last, null. Bins of categories:
    `categories` (the most frequent, as text), the rest of the training values, values that training never saw, null.
    `known`: sorted murmur3 hashes of the rest, base64; None when there were too many, then all count as the rest. Bins
    of timestamps: the 24 hours of the day (UTC), null.
    """

    name: str
    field: str
    source: Literal["request", "score"]
    kind: BinKind
    element: int | None = None
    edges: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()
    known: str | None = ""

    def __post_init__(self) -> None:
        if self.kind == "number" and (not self.edges or list(self.edges) != sorted(self.edges)):
            raise ValueError(f"column {self.name!r}: edges must rise")

    @property
    def bins(self) -> int:
        if self.kind == "number":
            return max(len(self.edges) - 1, 1) + 3
        return (24 if self.kind == "timestamp" else len(self.categories) + 2) + 1

    def cumulated(self, counts: Any) -> Any:
        """Counts of bins (the last axis) as a quick series takes them: a bin of numbers stands for all values up to its
        upper end, so that a shift of many bins is seen as one."""
        if self.kind != "number":
            return counts
        found = counts.copy()
        found[..., self.by_value] = counts[..., self.by_value].cumsum(axis=-1)
        return found

    @property
    def by_value(self) -> list[int]:
        """The bins of numbers in the order of their values, without null."""
        inner = self.bins - 3
        return [inner, *range(inner), inner + 1]

    def series_labels(self, *, quick: bool) -> tuple[str, ...]:
        """The name of each bin of a series, for people."""
        if self.kind != "number" or not quick:
            return self.labels
        ends = (*(self.edges[1:] or self.edges), self.edges[0], self.edges[-1])
        inner = tuple(f"values up to {end:.4g}" for end in ends[:-2])
        return (*inner, self.labels[-3], f"values up to {ends[-1]:.4g} or above", "null")

    @property
    def outside(self) -> int:
        """How many of the last bins hold what training has hardly: values out of range, unseen values, null."""
        return {"number": 3, "category": 2, "timestamp": 1}[self.kind]

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of each bin, for people."""
        if self.kind == "number":
            pairs = zip(self.edges, self.edges[1:] or self.edges, strict=False)
            inner = tuple(f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}" for low, high in pairs)
            return (*inner, f"below {self.edges[0]:.4g}", f"above {self.edges[-1]:.4g}", "null")
        if self.kind == "timestamp":
            return (*(f"{hour:02d}:00" for hour in range(24)), "null")
        return (*self.categories, "other known values", UNSEEN, "null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The rows with one value of a column of `export.segments`: a category of a column of the statistics, by place."""

    column: int
    category: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSeries:
    """One column, in all rows or in one segment. Per bin: `share` in training, `tolerance` (a smaller shift of the mean
    share is not drift) and `block` (the time over which a share is taken). `capped`: the mean training share when that
    of a block counts as at most `cap`, for bets on "less"; `floored`: when it counts as at least `floor`, for bets on
    "more". `block_rows`: of a training block; the larger, the more is allowed for chance in a block with few rows.

    `column`: its place in the statistics. `weight`: its part of the false alarms; all weights add up to 1. `quick`: a
    second series of the column for large shifts. Its blocks are short, and `floored` and `capped` are the largest and
    the smallest mean of a few neighbouring training blocks, so that a daily pattern is within them.
    """

    column: int
    segment: Segment | None = None
    quick: bool = False
    weight: float
    rows: int
    share: tuple[float, ...]
    cap: tuple[float, ...]
    capped: tuple[float, ...]
    floor: tuple[float, ...]
    floored: tuple[float, ...]
    block_rows: tuple[float, ...]
    tolerance: tuple[float, ...]
    block: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftStatistics(Document, form="serin.drift"):
    """What live traffic is compared with. Made from `rows` of `total_rows` training rows, from `first` to `last`
    (seconds since 1970; None without a time column), `weeks` complete weeks.

    `false_alarms`: per year, over all series together. `origin`: where the tolerances come from, the `weeks` of the
    training period or the `spec`; `kappa`: how many times the largest deviation of a week they are.
    """

    columns: tuple[BinnedColumn, ...]
    series: tuple[DriftSeries, ...]
    false_alarms: float
    origin: Literal["weeks", "spec"]
    kappa: float | None
    weeks: int
    rows: int
    total_rows: int
    first: float | None
    last: float | None

    def __post_init__(self) -> None:
        for series in self.series:
            column, segment = self.columns[series.column], series.segment
            if any(len(getattr(series, name)) != column.bins for name in _PER_BIN):
                raise ValueError(
                    f"column {column.name!r} has {column.bins} bins; a series has another number"
                )
            if segment is not None and not self.columns[segment.column].categories[segment.category]:
                raise ValueError(f"column {column.name!r}: unknown segment")

    def segment_name(self, segment: Segment) -> str:
        column = self.columns[segment.column]
        return f"{column.name}={column.categories[segment.category]}"

    def digest(self) -> str:
        """sha256 of the statistics: a detector's state belongs to one of them."""
        text = json.dumps(self.to_json(), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def read_drift(bundle: Path) -> DriftStatistics | None:
    """The statistics of a bundle; None for a bundle without, BundleBroken for a file that cannot be read."""
    path = bundle / FILE
    return read_facts(path, DriftStatistics.from_json) if path.is_file() else None
