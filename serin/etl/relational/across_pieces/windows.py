"""Windows over the past: counts, sums, means, extremes and lags of earlier rows with the same key.

A window ends before the row's own time (less its delay): rows of the same moment never see each other. Sums are exact
integers, whatever the values, and rounded once: they depend on the rows of the window alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column
from serin.columns.limbs import Limb, limbs
from serin.columns.rounding import nearest_ratios
from serin.columns.superaccumulator import Superaccumulator
from serin.errors import ColumnUnusable
from serin.etl.relational.groups import Int64, Timeline, group_codes
from serin.formats.schema import INT64_NULL
from serin.spec.relation import WindowColumn, WindowSpec

_US = 1_000_000


def look_back(spec: WindowSpec, columns: Mapping[str, Column], times: Int64) -> dict[str, Column]:
    """The window's columns for all rows. Rows with a null in the key or in the time get nulls. DataError when a sum of
    integers does not fit in 64 bits."""
    known = (times != INT64_NULL) & ~np.any([columns[key].null for key in spec.by], axis=0)
    rows = np.flatnonzero(known)
    groups, moments = group_codes([columns[key][rows] for key in spec.by]), times[rows]
    line = Timeline(groups, moments)
    ends = moments - round(spec.delay * _US)
    stop = line.before(groups, ends)
    start = line.starts(groups)
    stop = np.maximum(stop, start)
    if spec.span is not None:
        start = np.minimum(np.maximum(start, line.before(groups, ends - round(spec.span * _US))), stop)
    elif spec.rows is not None:
        start = np.maximum(start, stop - spec.rows)
    window = _Window(start=start, stop=stop, first=line.starts(groups))
    made = {}
    for name, asked in spec.columns.items():
        past = None if asked.column is None else columns[asked.column][rows][line.order]
        try:
            result = window.column(asked, past)
        except OverflowError as error:
            raise ColumnUnusable(
                column=name,
                problem=f"window column {name!r}: a sum of {asked.column!r} does not fit in 64 bits; use mean, or a "
                "shorter window",
            ) from error
        place = np.full(len(times), -1, np.int64)
        place[rows] = np.arange(len(rows))
        made[name] = result.take_or_null(place)
    return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Window:
    """For each row the part start .. stop of the ordered past; its group begins at `first`."""

    start: Int64
    stop: Int64
    first: Int64

    def column(self, asked: WindowColumn, past: Column | None) -> Column:
        if asked.function == "lag":
            assert past is not None
            at = self.stop - asked.back
            return past.take_or_null(np.where(at >= self.first, at, -1))
        if past is None:
            return Column(kind="int", values=self.stop - self.start)
        usable = ~past.null
        if past.kind == "float":
            usable &= np.isfinite(past.values)
        count = self._sum(usable.astype(np.int64))
        if asked.function == "count":
            return Column(kind="int", values=count)
        if asked.function in ("sum", "mean"):
            return self._total(asked.function, past, usable, count)
        return self._extreme(asked.function, past, usable, count)

    def _sum(self, values: Int64) -> Int64:
        """Exact when the result fits, whatever the running sum did in between: int64 wraps both ways."""
        running = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
        return np.asarray(running[self.stop] - running[self.start])

    def _total(self, function: str, past: Column, usable: npt.NDArray[np.bool_], count: Int64) -> Column:
        none = count == 0
        dtype = np.float32 if past.kind == "float" else np.int64
        values = np.where(usable, past.values, 0).astype(dtype, copy=False)
        longest = int((self.stop - self.start).max(initial=0))
        parts = limbs(values, most_bits=62 - longest.bit_length())
        sums = [Limb(part.exponent, self._sum(part.digits.astype(np.int64, copy=False))) for part in parts]
        if function == "sum" and past.kind != "float":
            return Column(kind="int", values=np.where(none, INT64_NULL, _to_int64(sums, count.shape)))
        divisor = np.maximum(count, 1) if function == "mean" else np.ones_like(count)
        return Column(kind="float", values=np.where(none, np.float32("nan"), nearest_ratios(sums, divisor)))

    def _extreme(self, function: str, past: Column, usable: npt.NDArray[np.bool_], count: Int64) -> Column:
        values = past.values
        if values.dtype.kind == "f":
            worst: float = np.inf if function == "min" else -np.inf
        else:
            limits = np.iinfo(values.dtype)
            worst = limits.max if function == "min" else limits.min
        level = np.where(usable, values, np.asarray(worst, values.dtype))
        best: Callable[..., npt.NDArray[np.generic]] = np.minimum if function == "min" else np.maximum
        found = np.full(len(self.start), np.asarray(worst, values.dtype))
        length = self.stop - self.start
        width = 1
        while len(level) and width <= int(length.max(initial=0)):
            # Two stretches of `width` rows, which overlap, cover every window of up to twice that length.
            own = np.flatnonzero((length >= width) & (length < 2 * width))
            found[own] = best(level[self.start[own]], level[self.stop[own] - width])
            level = best(level[:-width], level[width:]) if len(level) > width else level[:0]
            width *= 2
        null = np.full(1, -1, np.int64)
        kept = np.where(count == 0, null, np.arange(len(found)))
        return Column(kind=past.kind, values=found).take_or_null(kept)


def _to_int64(sums: Sequence[Limb], shape: tuple[int, ...]) -> Int64:
    """OverflowError when one does not fit, or is the int64 that means null."""
    if len(sums) == 1:
        return np.asarray(sums[0].digits)
    whole = Superaccumulator.of(sums, shape).to_int64()
    if (whole == INT64_NULL).any():
        raise OverflowError
    return whole
