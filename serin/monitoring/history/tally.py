"""Counts the requests of a batch of log lines by model, release, arm and minute. Pure; nothing loops over requests in
Python but the lookup of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from serin.formats.serving.request import CLIENT_GONE, SERVER_FAULTS, Request
from serin.monitoring.history.sketch import BINS, Array, Sketch, bins_of

MINUTE_S: Final = 60

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
    """Returns the counts of each series and minute (its start, seconds since 1970)."""
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
    cancelled = np.array([_cancelled(flags) for flags in columns["flags"]], dtype=bool)
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


def _cancelled(flags: object) -> bool:
    return flags != "-" and not CLIENT_GONE.isdisjoint(str(flags).split(","))


def _sketches(group: Array, us: Array, groups: int) -> list[Sketch]:
    answered = ~np.isnan(us)
    cells, counts = np.unique(group[answered] * BINS + bins_of(us[answered]), return_counts=True)
    ends = np.searchsorted(cells, np.arange(1, groups) * BINS)
    bins = np.split(cells % BINS, ends)
    return [Sketch(*pair) for pair in zip(bins, np.split(counts, ends), strict=True)]
