"""How long the drift detector takes: the size of a shift and the rows a minute against the minutes until the alarm.

python -m benchmarks.watch.shift_table
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa

from serin.export.drift.build import make_statistics
from serin.export.drift.choose_bins import Source
from serin.formats.drift import BLOCK_S, SHORTEST, DriftStatistics
from serin.formats.wire import TrainingRows
from serin.monitoring.drift.detector import DriftDetector
from serin.spec.monitoring import DriftSpec

SHARES: Final = (0.01, 0.05, 0.3)
GROWTHS: Final = (0.03, 0.1, 0.3)
RATES: Final = (200, 1000, 10_000)  # rows a minute
COLUMNS: Final = 20
_VALUES: Final = 10
_NAMES: Final = np.asarray([str(place) for place in range(_VALUES)], dtype=object)
_TRAINING_ROWS: Final = 300_000
_MOST_MINUTES: Final = 300
_QUIET_MINUTES: Final = 30

Found = Mapping[tuple[float, float, int], float | None]


@cache
def learned(share: float) -> DriftStatistics:
    """What an export makes of eight weeks of independent rows, as one of 20 columns."""
    random = np.random.default_rng(int(1e4 * share))
    values = random.choice(_VALUES, _TRAINING_ROWS, p=_shares(share))
    times = np.sort(random.uniform(0, 8 * 7 * 86_400 + 60, _TRAINING_ROWS))
    rows = TrainingRows(table=pa.table({"x": _NAMES[values]}), times=times, total=_TRAINING_ROWS)
    source = Source(name="x", field="x", source="request")
    known = make_statistics(rows, [source], segments=(), spec=DriftSpec(), importance={})
    series = tuple(replace(each, weight=each.weight / COLUMNS) for each in known.series)
    return replace(known, series=series)


def minutes_until_alarm(share: float, growth: float, rate: int, seed: int) -> float | None:
    """Minutes from the growth of a share until the alarm; None when it comes before, or not at all."""
    known = learned(share)
    order = [int(label) for label in known.columns[0].categories]
    random = np.random.default_rng([seed, int(1e4 * share), int(1e4 * growth), rate])
    detector, step_s = DriftDetector(known), BLOCK_S[SHORTEST]
    quiet = int(60 * _QUIET_MINUTES / step_s)
    for step in range(quiet + int(60 * _MOST_MINUTES / step_s)):
        drawn = random.multinomial(
            random.poisson(rate * step_s / 60), _shares(share if step < quiet else share + growth)
        )
        counts = np.tile(np.append(drawn[order], (0, 0, 0)), len(known.series))
        if detector.observe([int(step * step_s)], counts[None, :]).alarms:
            return None if step < quiet else (step - quiet) * step_s / 60
    return None


def _shares(first: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray([first, *[(1 - first) / (_VALUES - 1)] * (_VALUES - 1)])


def measure_shifts(*, runs: int, say: Callable[[str], None]) -> Found:
    found: dict[tuple[float, float, int], float | None] = {}
    for rate in RATES:
        for share in SHARES:
            for growth in GROWTHS:
                tries = [minutes_until_alarm(share, growth, rate, seed) for seed in range(runs)]
                median = float(np.median([np.inf if each is None else each for each in tries]))
                found[share, growth, rate] = None if np.isinf(median) else median
        say(f"drift: shifts at {rate:,} rows a minute: {_cells(found, rate)}")
    return found


def table(found: Found) -> list[str]:
    lines = [
        f"watch, drift: minutes until the alarm, in one of {COLUMNS} columns, tolerance 1%",
        f"  {'share grows':<20}" + "".join(f"{f'{rate:,} rows/min':>18}" for rate in RATES),
    ]
    for share in SHARES:
        for growth in GROWTHS:
            cells = [_minutes(found[share, growth, rate]) for rate in RATES]
            name = f"{share:.0%} to {share + growth:.0%}"
            lines.append(f"  {name:<20}" + "".join(f"{cell:>18}" for cell in cells))
    return [*lines, ""]


def last_line(found: Found) -> dict[str, float]:
    """At 1,000 rows a minute: minutes until a share of 5% and one of 30% that grow by 30 points are found."""
    wanted = {"minutes_5_to_35": (0.05, 0.3, 1000), "minutes_30_to_60": (0.3, 0.3, 1000)}
    return {
        name: float("inf") if found[case] is None else float(found[case] or 0)
        for name, case in wanted.items()
    }


def _cells(found: Found, rate: int) -> str:
    return ", ".join(_minutes(found[share, growth, rate]) for share in SHARES for growth in GROWTHS)


def _minutes(value: float | None) -> str:
    return f"over {_MOST_MINUTES}" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    print("\n".join(table(measure_shifts(runs=11, say=print))))
