"""Cuts requests into blocks of one second by arrival, with an arm of equal weight for the candidate. Pure.

Log lines are in the order in which requests ended. A block stays open until requests were seen that arrived
`watermark_s` after its end; a line that comes later still counts, in the first block that is open then. Blocks depend
on the lines alone, not on how they were split into reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final, Self

import numpy as np

from serin.evidence.e_process import Array
from serin.evidence.histogram import BINS, bins_of, count
from serin.formats.serving.request import Request
from serin.machine.typed_json import Document, Row, Stored
from serin.rollout.decide.guards import Arms
from serin.rollout.decide.plan import Plan

_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_AWAY: Final = 0.1  # share of an arm's requests that another release answered


@dataclass(frozen=True, slots=True)
class Counts(Row):
    """Requests of one arm: all, failed on it, slower than promised, and rejected as the client's fault."""

    requests: int = 0
    errors: int = 0
    slow: int = 0
    refused: int = 0

    @property
    def error_share(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    @property
    def slow_share(self) -> float:
        return self.slow / self.requests if self.requests else 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.requests + other.requests,
            self.errors + other.errors,
            self.slow + other.slow,
            self.refused + other.refused,
        )


NO_COUNTS: Final = Counts()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """Requests of the two arms as columns, in the log's order."""

    t: Array
    epoch: Array
    candidate: Array  # bool
    baseline: Array  # bool
    failed: Array  # bool
    refused: Array  # bool
    saved: Array  # bool: retried, and so answered by another release
    us: Array  # infinite without an answer; the time that a client waited which went away
    gone: Array  # bool: the client went away before it had its answer
    lot: Array  # uint64, a hash of the request's id and arrival

    def __len__(self) -> int:
        return len(self.t)

    def pick(self, chosen: Array | slice) -> Lines:
        return Lines(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})


def counts2json(counts: Array) -> list[list[Any]]:
    """Returns the non-empty bins with their counts."""
    held = np.flatnonzero(counts)
    return [held.tolist(), counts[held].tolist()]


def json2counts(value: Sequence[Sequence[Any]], kind: Any = np.float64) -> Array:
    counts = np.zeros(BINS, dtype=kind)
    counts[np.asarray(value[0], dtype=np.int64)] = value[1]
    return counts


CountedRows = Annotated[
    Array,
    Stored(
        lambda rows: np.array([json2counts(row, np.int64) for row in rows]),
        lambda bins: [counts2json(row) for row in bins],
    ),
]
Wealth = Annotated[Array, Stored(np.array, np.ndarray.tolist)]  # of one bet


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block(Document):
    """A block's latencies as bin counts (the rows of `bins` are ROWS), and counts per arm."""

    bins: CountedRows  # (5, bins)
    candidate: Counts = NO_COUNTS
    stable: Counts = NO_COUNTS
    equal_errors: tuple[int, int] = (0, 0)  # of the arms of equal weight: candidate, control
    equal_refused: tuple[int, int] = (0, 0)
    equal_saved: tuple[int, int] = (0, 0)  # answered by another release
    saved: tuple[int, int] = (0, 0)  # of all the candidate's, and of stable's without its baseline
    # By weight epoch: candidate's, all.
    splits: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def stable_away(self) -> bool:
        """Returns whether the candidate took over requests of the stable release, and so had its load too."""
        return self.saved[1] > _AWAY * self.stable.requests

    @property
    def void(self) -> bool:
        """Returns whether an arm took over too many requests of another: such a block does not judge latency.

        The arms of equal weight are checked first, because both are then equally likely to lose that many by chance.
        The whole arms are checked too: of an arm that is away, the random sample may be empty.
        """
        control, candidate = int(self.bins[2].sum()), int(self.bins[3].sum())
        equal = self.equal_saved[0] > _AWAY * candidate or self.equal_saved[1] > _AWAY * control
        return equal or self.saved[0] > _AWAY * self.candidate.requests or self.stable_away

    @classmethod
    def empty(cls) -> Self:
        return cls(bins=np.zeros((len(ROWS), BINS), dtype=np.int64))

    def __add__(self, other: Block) -> Block:
        return Block(
            bins=self.bins + other.bins,
            candidate=self.candidate + other.candidate,
            stable=self.stable + other.stable,
            equal_errors=add_pairs(self.equal_errors, other.equal_errors),
            splits={
                epoch: add_pairs(self.splits.get(epoch, (0, 0)), other.splits.get(epoch, (0, 0)))
                for epoch in {*self.splits, *other.splits}
            },
            equal_refused=add_pairs(self.equal_refused, other.equal_refused),
            equal_saved=add_pairs(self.equal_saved, other.equal_saved),
            saved=add_pairs(self.saved, other.saved),
        )

    @property
    def times(self) -> Array:
        """The latencies for a comparison: `bins`, or zeros where the block does not judge latency."""
        return self.bins * (not self.void)

    def arms(self, *, warm: bool = True) -> Arms:
        """Returns the arms for the guards, without latencies while the candidate is not `warm`.

        Failures always count, even if another release answered the client or caches are cold.
        """
        times = self.times * warm
        return Arms(
            stable=times[0],
            control=times[2],
            candidate=times[3],
            candidate_bad=times[4],
            control_errors=np.asarray(self.equal_errors[1]),
            candidate_errors=np.asarray(self.equal_errors[0]),
            control_refused=np.asarray(self.equal_refused[1]),
            candidate_refused=np.asarray(self.equal_refused[0]),
        )


ROWS: Final = ("stable", "candidate", "control", "candidate by the margin", "candidate by the bad margin")


def add_pairs(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def columns(requests: Sequence[Request], *, candidate: str, stable: str) -> Lines:
    """Returns the requests that were routed by weight, each once: a duplicate log line counts once."""
    arms = {
        ("candidate", candidate): "candidate",
        ("stable", stable): "stable",
        ("baseline", f"{stable}-baseline"): "baseline",
    }
    picked = [(each, arm) for each in requests if (arm := arms.get((each.arm, each.release)))]
    t = np.array([request.t for request, _ in picked], dtype=np.float64)
    ids = np.array([zlib.crc32(request.id.encode()) for request, _ in picked], dtype=np.uint64)
    lines = Lines(
        t=t,
        epoch=np.array([request.epoch for request, _ in picked], dtype=np.int64),
        candidate=np.array([arm == "candidate" for _, arm in picked], dtype=bool),
        baseline=np.array([arm == "baseline" for _, arm in picked], dtype=bool),
        failed=np.array([request.failed for request, _ in picked], dtype=bool),
        refused=np.array([request.refused for request, _ in picked], dtype=bool),
        saved=np.array([request.attempts > 1 for request, _ in picked], dtype=bool),
        us=np.array([_latency(request) for request, _ in picked], dtype=np.float64),
        gone=np.array([request.waited_us is not None for request, _ in picked], dtype=bool),
        lot=_draw(ids, t),
    )
    if len(lines) == 0:
        return lines
    _, first = np.unique(lines.lot, return_index=True)
    return lines if len(first) == len(lines) else lines.pick(np.sort(first))


def _latency(request: Request) -> float:
    """The latency in microseconds. A client that went away had waited for so long, and the answer would have come
    later: so a candidate from which clients turn away because it is slow is slow."""
    if request.us is not None:
        return request.us
    return np.inf if request.waited_us is None else request.waited_us


def _draw(ids: Array, t: Array) -> Array:
    """Returns 64 uniform bits by id and arrival: a client that repeats an id must not choose its arm."""
    lot = ids * _MIX ^ np.round(t * 1e6).astype(np.int64).astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        lot = (lot ^ lot >> np.uint64(shift)) * np.uint64(factor)
    drawn: Array = lot ^ lot >> np.uint64(31)
    return drawn


def cut(lines: Lines, shares: Mapping[int, float], plan: Plan) -> Block:
    """Cuts the lines of one block into arms. `shares` is the candidate's part of traffic (0 .. 1) in each weight epoch.

    A client that went away before it had waited as long as promised is neither slow nor failed: only the comparison has
    it, with the time that it waited.

    Of the larger arm, a random sample of the size of the smaller one is kept for the comparison. With a baseline, the
    control below 50% is the traffic that went there; stable's counts include both of its processes.
    """
    share = np.array([shares.get(epoch, 0.0) for epoch in lines.epoch.tolist()])
    candidate, stable = lines.candidate, ~lines.candidate
    kept = np.minimum(share, 1 - share) / np.where(candidate, share, 1 - share).clip(1e-12)
    equal = (lines.lot >> np.uint64(32)) < kept * 2.0**32
    forgiven = (lines.lot & np.uint64(0xFFFFFFFF)) >= 2.0**32 / plan.error_tolerance
    compared = candidate & equal
    control = stable & np.where(plan.baseline & (share < 0.5), lines.baseline, equal)
    slow = lines.us > (np.inf if plan.slo_ms is None else plan.slo_ms * 1000)
    judged = ~lines.gone | slow | lines.failed
    plain = bins_of(lines.us)
    rows = (
        count(plain[stable & judged]),
        count(plain[candidate & judged]),
        count(plain[control]),
        count(bins_of(lines.us[compared], margin=plan.margin, tolerance_us=plan.tolerance_ms * 1e3)),
        count(bins_of(lines.us[compared], margin=plan.bad_margin, tolerance_us=plan.bad_tolerance_ms * 1e3)),
    )
    return Block(
        bins=np.array(rows, dtype=np.int64),
        candidate=_counted(candidate & judged, lines.failed, slow, lines.refused),
        stable=_counted(stable & judged, lines.failed, slow, lines.refused),
        equal_errors=_both(compared & ~forgiven, control, lines.failed),
        equal_refused=_both(compared, control, lines.refused),
        equal_saved=_both(compared, control, lines.saved),
        splits={
            epoch: (int((candidate & (lines.epoch == epoch)).sum()), int((lines.epoch == epoch).sum()))
            for epoch in np.unique(lines.epoch).tolist()
        },
        saved=_both(candidate, stable & ~lines.baseline, lines.saved),
    )


def _both(candidate: Array, other: Array, what: Array) -> tuple[int, int]:
    return int((candidate & what).sum()), int((other & what).sum())


def _counted(arm: Array, *what: Array) -> Counts:
    return Counts(int(arm.sum()), *(int((arm & some).sum()) for some in what))
