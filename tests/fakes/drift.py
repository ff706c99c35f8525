"""Drift statistics made by hand, for tests that need no export."""

from collections.abc import Sequence

from serin.formats.drift import BinnedColumn, Block, DriftSeries, DriftStatistics, Segment


def category_column(name: str, categories: Sequence[str]) -> BinnedColumn:
    return BinnedColumn(
        name=name, field=name, source="request", kind="category", categories=tuple(categories)
    )


def series_of(
    column: int,
    share: Sequence[float],
    *,
    block: Block | Sequence[Block] = "minute",
    tolerance: float = 0.01,
    weight: float = 1.0,
    segment: Segment | None = None,
) -> DriftSeries:
    """A series with these shares; shares of a block of 200 rows are cut off at their mean."""
    share = tuple(map(float, share))
    blocks = (block,) * len(share) if isinstance(block, str) else tuple(block)
    return DriftSeries(
        column=column,
        segment=segment,
        weight=weight,
        rows=100_000,
        share=share,
        cap=share,
        capped=tuple(max(value - 0.4 * (value * (1 - value) / 200) ** 0.5, 0.0) for value in share),
        floor=share,
        floored=tuple(value + 0.4 * (value * (1 - value) / 200) ** 0.5 for value in share),
        block_rows=(200.0,) * len(share),
        tolerance=(tolerance,) * len(share),
        block=blocks,
    )


def statistics_of(
    columns: Sequence[BinnedColumn], series: Sequence[DriftSeries], *, false_alarms: float = 1.0
) -> DriftStatistics:
    return DriftStatistics(
        columns=tuple(columns),
        series=tuple(series),
        false_alarms=false_alarms,
        origin="spec",
        kappa=None,
        weeks=0,
        rows=100_000,
        total_rows=100_000,
        first=None,
        last=None,
    )
