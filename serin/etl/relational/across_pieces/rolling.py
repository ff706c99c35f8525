"""Rolling windows over the past of each row.

A window ends before the row's own time (less its delay): rows of the same moment never see each other. Sums are exact
integers, whatever the values, and rounded once: they depend on the rows of the window alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column, any_true, array_module, beside, on_host
from serin.columns.exact import Limb, Superaccumulator, limbs, nearest_ratios
from serin.errors import ColumnUnusable
from serin.etl.relational.groups import Int64, Timeline, group_codes
from serin.formats.schema import INT64_NULL
from serin.spec.relation import WindowColumn, WindowSpec

_US = 1_000_000


def look_back(spec: WindowSpec, columns: Mapping[str, Column], times: Int64) -> dict[str, Column]:
    """The window's columns for all rows. Rows with a null in the key or in the time get nulls. DataError when a sum of
    integers does not fit in 64 bits."""
    xp, known = array_module(times), times != INT64_NULL
    for key in spec.by:
        known &= ~columns[key].null
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
    window = Window(start=start, stop=stop, first=line.starts(groups))
    place = xp.full(len(times), -1, np.int64)
    place[rows] = xp.arange(len(rows))
    return {
        name: made.take_or_null(place)
        for name, made in window.columns(spec, columns, rows[line.order]).items()
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """For each row the part start .. stop of the ordered past; its group begins at `first`."""

    start: Int64
    stop: Int64
    first: Int64

    @property
    def _longest(self) -> int:
        return int((self.stop - self.start).max()) if len(self.start) else 0

    def columns(self, spec: WindowSpec, columns: Mapping[str, Column], past: Int64) -> dict[str, Column]:
        """The columns of a window. `past`: the rows of the ordered past. DataError when a sum of integers does not fit
        in 64 bits."""
        made = {}
        for name, asked in spec.columns.items():
            values = None if asked.column is None else columns[asked.column][past]
            try:
                made[name] = self.column(asked, values)
            except OverflowError as error:
                raise ColumnUnusable(
                    column=name,
                    problem=f"window column {name!r}: a sum of {asked.column!r} does not fit in 64 bits; use mean, or "
                    "a shorter window",
                ) from error
        return made

    def column(self, asked: WindowColumn, past: Column | None) -> Column:
        if asked.function == "lag":
            assert past is not None
            at = self.stop - asked.back
            return past.take_or_null(np.where(at >= self.first, at, np.int64(-1)))
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
        xp = array_module(values)
        running = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(values, dtype=np.int64)])
        sums: Int64 = running[self.stop] - running[self.start]
        return sums

    def _total(self, function: str, past: Column, usable: npt.NDArray[np.bool_], count: Int64) -> Column:
        dtype = np.float32 if past.kind == "float" else np.int64
        values = np.where(usable, past.values, dtype(0)).astype(dtype, copy=False)
        parts = limbs(values, most_bits=62 - self._longest.bit_length())
        sums = [
            Limb(part.exponent, on_host(self._sum(part.digits.astype(np.int64, copy=False))))
            for part in parts
        ]
        counts = on_host(count)  # which also rounds: a GPU would flush subnormal results
        none = counts == 0
        if function == "sum" and past.kind != "float":
            made: Any = np.where(none, INT64_NULL, _to_int64(sums, counts.shape))
            return Column(kind="int", values=beside(made, values))
        divisor = np.maximum(counts, 1) if function == "mean" else np.ones_like(counts)
        made = np.where(none, np.float32("nan"), nearest_ratios(sums, divisor))
        return Column(kind="float", values=beside(made, values))

    def _extreme(self, function: str, past: Column, usable: npt.NDArray[np.bool_], count: Int64) -> Column:
        values, xp = past.values, array_module(past.values)
        if values.dtype.kind == "f":
            worst: float = np.inf if function == "min" else -np.inf
        else:
            limits = np.iinfo(values.dtype)
            worst = limits.max if function == "min" else limits.min
        level = np.where(usable, values, values.dtype.type(worst))
        best: Callable[..., npt.NDArray[np.generic]] = np.minimum if function == "min" else np.maximum
        found = xp.full(len(self.start), worst, values.dtype)
        length = self.stop - self.start
        width = 1
        while len(level) and width <= self._longest:
            # Two stretches of `width` rows, which overlap, cover every window of up to twice that length.
            own = np.flatnonzero((length >= width) & (length < 2 * width))
            found[own] = best(level[self.start[own]], level[self.stop[own] - width])
            level = best(level[:-width], level[width:]) if len(level) > width else level[:0]
            width *= 2
        if values.dtype.kind == "f":
            found = found + np.float32(0)  # either zero becomes 0, in whatever order rows were compared
        kept = np.where(count == 0, np.int64(-1), xp.arange(len(found)))
        return Column(kind=past.kind, values=found).take_or_null(kept)


def _to_int64(sums: Sequence[Limb], shape: tuple[int, ...]) -> Int64:
    """OverflowError when one does not fit, or is the int64 that means null."""
    if len(sums) == 1:
        return np.asarray(sums[0].digits)
    whole = Superaccumulator.of(sums, shape).to_int64()
    if any_true(whole == INT64_NULL):
        raise OverflowError
    return whole
