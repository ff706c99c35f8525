"""Accumulates what is seen of a candidate that answers recorded requests before it has traffic. Pure.

All of it is in the journal, with the place in the records at which the replay continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Self

import numpy as np

from serin.evidence.e_process import Array, e_value
from serin.evidence.histogram import BINS, bins_of, count, quantiles_us
from serin.rollout.decide.blocks import NO_COUNTS, Counts, counts2json, json2counts
from serin.rollout.decide.guards import PROMISES, hold_to_promises
from serin.rollout.decide.plan import Plan

ALL_ROWS: Final = "all rows"
FEWEST_ROWS: Final = 50  # a segment with fewer is shown and not judged
MOST_VALUES: Final = 50  # of a segment's column; the others are counted together
OTHERS: Final = "other values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How the candidate's scores differ from the live version's on some rows. Sums over the rows, not means."""

    rows: int = 0
    live: float = 0.0  # of the live version's absolute scores
    signed: float = 0.0  # of candidate minus live
    absolute: float = 0.0
    lost: int = 0  # further rows: the candidate's score is not a finite number, the live version's is

    def __add__(self, other: Difference) -> Difference:
        mine, more = asdict(self), asdict(other)
        return Difference(**{name: mine[name] + more[name] for name in mine})

    @property
    def mean(self) -> float:
        return self.signed / self.rows if self.rows else 0.0

    @property
    def mean_absolute(self) -> float:
        return self.absolute / self.rows if self.rows else 0.0

    @property
    def mean_live(self) -> float:
        return self.live / self.rows if self.rows else 0.0

    @property
    def relative(self) -> float:
        """The mean absolute difference as a share of the live version's mean score."""
        if self.lost:
            return float("inf")
        if self.absolute == 0:
            return 0.0
        return self.absolute / self.live if self.live else float("inf")

    def to_json(self) -> list[float]:
        return [self.rows, self.live, self.signed, self.absolute, self.lost]

    @classmethod
    def from_json(cls, value: Sequence[float]) -> Self:
        rows, live, signed, absolute, lost = value
        return cls(rows=int(rows), live=live, signed=signed, absolute=absolute, lost=int(lost))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A row whose served score is not what the candidate's bundle computes, also when it was asked again."""

    request: str
    row: int  # within the request
    segments: tuple[str, ...]
    output: str
    served: str
    computed: str
    values: Mapping[str, str]  # of the row's columns

    def __str__(self) -> str:
        where = f" ({', '.join(self.segments)})" if self.segments else ""
        return (
            f"row {self.row} of request {self.request}{where} is served with {self.output} {self.served}, its bundle "
            f"computes {self.computed}"
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "segments": tuple(value["segments"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests that were sent within about a second, and where to continue after them.

    `us`: the latency of each request that was answered. `compared`: rows that were also computed by the bundle.
    """

    requests: int
    failed: int
    us: tuple[float, ...]
    rows: int
    compared: int
    unsteady: int  # rows whose score was wrong once, and right when it was asked again
    segments: Mapping[str, Difference]
    place: Mapping[str, Any]
    mismatch: Mismatch | None = None
    failure: str = ""  # the first failed request's message

    def to_json(self) -> dict[str, Any]:
        segments = {name: found.to_json() for name, found in self.segments.items()}
        return {**asdict(self), "segments": segments}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        segments = {name: Difference.from_json(found) for name, found in value["segments"].items()}
        mismatch = Mismatch.from_json(value["mismatch"]) if value["mismatch"] else None
        return cls(**{**value, "us": tuple(value["us"]), "segments": segments, "mismatch": mismatch})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tally:
    """All that was seen of a candidate's answers to recorded requests.

    `waiting`: why nothing is sent at the moment; `unable`: why it never can be. Neither is a fault of the candidate.
    """

    counts: Counts = NO_COUNTS
    rows: int = 0
    compared: int = 0
    unsteady: int = 0
    segments: Mapping[str, Difference] = field(default_factory=dict)
    place: Mapping[str, Any] = field(default_factory=dict)
    mismatch: Mismatch | None = None
    failure: str = ""
    log_wealth: Mapping[str, Array] = field(default_factory=dict)  # of the bets on promises
    seen: Array = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))  # latencies
    waiting: str = ""
    unable: str = ""

    @property
    def e_value(self) -> float:
        """The evidence that the candidate breaks a promise."""
        found = [float(e_value(log_wealth)) for log_wealth in self.log_wealth.values()]
        return sum(found) / len(PROMISES) if found else 1.0

    @property
    def broken(self) -> str:
        """The promise that the evidence is strongest against."""
        return max(self.log_wealth, key=lambda name: float(e_value(self.log_wealth[name])))

    def quantiles_us(self, plan: Plan) -> list[float | None]:
        return quantiles_us(self.seen, plan.quantiles)

    def ordered(self) -> list[tuple[str, Difference]]:
        """All segments by column, those with the most rows first; all rows at the top."""
        place = {column: number for number, column in enumerate(dict.fromkeys(map(_column, self.segments)))}
        found = sorted(self.segments.items(), key=lambda entry: (place[_column(entry[0])], -entry[1].rows))
        return sorted(found, key=lambda entry: not entry[0].startswith(ALL_ROWS))

    def beyond(self, limit: float) -> list[tuple[str, Difference]]:
        """The segments with enough rows that differ by more than `limit`, the farthest first."""
        judged = {
            name: found
            for name, found in self.segments.items()
            if found.rows + found.lost >= FEWEST_ROWS or name.startswith(ALL_ROWS)
        }
        far = [(name, found) for name, found in judged.items() if found.relative > limit]
        return sorted(far, key=lambda entry: -entry[1].relative)

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": self.counts.to_json(),
            "rows": self.rows,
            "compared": self.compared,
            "unsteady": self.unsteady,
            "segments": {name: found.to_json() for name, found in self.segments.items()},
            "place": dict(self.place),
            "mismatch": asdict(self.mismatch) if self.mismatch else None,
            "failure": self.failure,
            "log_wealth": {name: log_wealth.tolist() for name, log_wealth in self.log_wealth.items()},
            "seen": counts2json(self.seen),
            "waiting": self.waiting,
            "unable": self.unable,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads a tally. An empty object means that nothing was sent yet."""
        if not value:
            return cls()
        return cls(
            counts=Counts(*value["counts"]),
            rows=value["rows"],
            compared=value["compared"],
            unsteady=value["unsteady"],
            segments={name: Difference.from_json(found) for name, found in value["segments"].items()},
            place=value["place"],
            mismatch=Mismatch.from_json(value["mismatch"]) if value["mismatch"] else None,
            failure=value["failure"],
            log_wealth={name: np.array(log_wealth) for name, log_wealth in value["log_wealth"].items()},
            seen=json2counts(value["seen"], np.int64),
            waiting=value["waiting"],
            unable=value["unable"],
        )


def add_batch(tally: Tally, batch: Batch, plan: Plan) -> Tally:
    """Returns the tally with one more batch, which is one block of the bets on promises."""
    limit_us = float("inf") if plan.slo_ms is None else 1000 * plan.slo_ms
    slow = sum(us > limit_us for us in batch.us)
    more = Counts(requests=batch.requests, errors=batch.failed, slow=slow)
    log_wealth = dict(tally.log_wealth)
    if batch.requests:
        log_wealth |= hold_to_promises(log_wealth, PROMISES, (more.error_share, more.slow_share), plan)
    return replace(
        tally,
        counts=tally.counts + more,
        rows=tally.rows + batch.rows,
        compared=tally.compared + batch.compared,
        unsteady=tally.unsteady + batch.unsteady,
        segments=_added(tally.segments, batch.segments),
        place=batch.place,
        mismatch=tally.mismatch or batch.mismatch,
        failure=tally.failure or batch.failure,
        log_wealth=log_wealth,
        seen=tally.seen + count(bins_of(np.array(batch.us))),
        waiting="",
    )


def _added(known: Mapping[str, Difference], more: Mapping[str, Difference]) -> dict[str, Difference]:
    """Sums by segment. A column's values beyond MOST_VALUES are counted together, so that the size is bounded."""
    found = dict(known)
    sizes: dict[str, int] = {}
    for name in found:
        sizes[_column(name)] = sizes.get(_column(name), 0) + 1
    for name, difference in more.items():
        column = _column(name)
        if name not in found and sizes.get(column, 0) >= MOST_VALUES:
            name = f"{column}={OTHERS}"
        if name not in found:
            sizes[column] = sizes.get(column, 0) + 1
        found[name] = found.get(name, Difference()) + difference
    return found


def _column(segment: str) -> str:
    return segment.partition("=")[0].removesuffix(" is null")
