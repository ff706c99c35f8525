"""Chooses the rows per step when the spec says auto, and the learning rate and threads that fit them.

Auto takes the smallest step whose rows per second are within 5% of the fastest measured: more rows would only mean
fewer updates. An epoch keeps some two hundred steps, enough to learn from a small table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from serin.machine.durable import write_whole

_STEPS_PER_EPOCH = 200
_SMALLEST = 256
_LARGEST = {"cpu": 8192, "cuda": 65536}  # per rank
_NEAR_THE_PEAK = 0.95
_RATE_IS_FOR = 1024  # rows
_LARGEST_FACTOR = 4.0
_PRODUCTS_PER_THREAD = 10_000_000
_BUDGET_S = 1.5  # for all measurements together

Device = Literal["cpu", "cuda"]


def choose_threads(products: int, *, cores: int) -> int:
    """Returns the threads for a step of so many multiplications: a small step ends before a second thread has
    started."""
    return max(1, min(cores, products // _PRODUCTS_PER_THREAD))


def candidate_batch_rows(
    wanted: int | Literal["auto"], *, rows: int, ranks: int, device: Device, limit: int | None = None
) -> list[int]:
    """Returns the rows per step (all ranks together) to measure, smallest first: multiples of `ranks`, at most `rows`.

    Just one when there is nothing to choose, none when the rows do not fill the ranks. Powers of two, up to the one
    that gives an epoch some two hundred steps, within what a device handles well. `limit`: a size known not to fit.
    """
    if wanted != "auto":
        sizes = [wanted]
    else:
        power = 1 << max(0, (rows // _STEPS_PER_EPOCH).bit_length() - 1)
        most = min(max(power, _SMALLEST), _LARGEST[device] * ranks)
        sizes = [_SMALLEST << doubled for doubled in range((most // _SMALLEST).bit_length())]
        sizes = [size for size in sizes if limit is None or size < limit] or [_SMALLEST]
    whole = (
        min(-(-size // ranks) * ranks if wanted == "auto" else size, rows) // ranks * ranks for size in sizes
    )
    return sorted({size for size in whole if size})


def choose_batch_rows(rows_per_s: Mapping[int, float]) -> tuple[int, str]:
    """Returns the smallest size within 5% of the fastest, and the reason. Pure."""
    peak = max(rows_per_s.values())
    chosen = min(size for size, rate in rows_per_s.items() if rate >= _NEAR_THE_PEAK * peak)
    measured = ", ".join(f"{size:,}: {rate:,.0f}" for size, rate in rows_per_s.items())
    return chosen, f"rows/s by rows per step: {measured}"


def measure_batch_rows(
    sizes: list[int], seconds: Callable[[int], float | None], *, budget_s: float = _BUDGET_S
) -> tuple[int, str]:
    """Times a step of each size with `seconds`, which returns None for one that does not fit; (the chosen size, the
    reason).

    Stops where the next size would exceed the budget or does not fit. All ranks stop at the same size, since they get
    the same seconds.
    """
    if len(sizes) == 1:
        return sizes[0], "nothing to choose"
    rates: dict[int, float] = {}
    spent = 0.0
    for size in sizes:
        found = seconds(size)
        if found is None:
            break
        rates[size] = size / found
        spent += found
        if spent + 3 * found > budget_s:
            break
    return (
        choose_batch_rows(rates) if rates else (sizes[0], "no size fits at once; it will be split into parts")
    )


def scaled_rate(rate: float, batch_rows: int, *, optimizer: str, chosen: bool) -> float:
    """Returns the peak learning rate for a step of so many rows. Pure.

    A rate belongs to the rows per step given beside it in the spec. Where those are chosen here, it is meant for 1,024
    rows; with more rows it grows by the square root of the ratio (for SGD by the ratio), at most four times. Fewer rows
    leave it unchanged.
    """
    if not chosen or batch_rows <= _RATE_IS_FOR:
        return rate
    times = batch_rows / _RATE_IS_FOR
    return rate * min(_LARGEST_FACTOR, times if optimizer == "sgd" else times**0.5)


# A single process continues by itself. With several, the others wait inside a step for one that cannot continue: the
# new setting is stored, all exit, and the launcher restarts them from the last checkpoint.
class StartAgain(Exception):
    """Raised to restart all ranks; the changed settings are already in the run's folder."""


def smaller_parts(parts: int, rows: int) -> int | None:
    """Returns into how many parts `rows` are split next; None when they cannot be. Pure."""
    twice = 2 * parts
    return twice if rows % twice == 0 else None


def limit_batch(folder: Path, batch_rows: int) -> None:
    """Stores for the next measurement that so many rows did not fit."""
    write_whole(_limit_file(folder), f"{batch_rows}\n")


def batch_limit(folder: Path) -> int | None:
    try:
        return int(_limit_file(folder).read_text())
    except FileNotFoundError:
        return None


def _limit_file(folder: Path) -> Path:
    return folder / "batch_limit"
