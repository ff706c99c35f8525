"""Accumulates what is seen of a candidate that answers recorded requests before it has traffic. Pure.

All of it is in the journal, with the place in the records at which the replay continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Final

import numpy as np

from serin.evidence.e_process import Array, e_value
from serin.evidence.histogram import BINS, bins_of, count
from serin.machine.typed_json import Document, Row, Stored
from serin.rollout.decide.blocks import NO_COUNTS, Counts, Wealth, counts2json, json2counts
from serin.rollout.decide.guards import PROMISES, hold_to_promises
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.sentences import finding, latencies, percent, too_slow
from serin.rollout.decide.state import Verdict

ALL_ROWS: Final = "all rows"
FEWEST_ROWS: Final = 50  # a segment with fewer is shown and not judged
MOST_VALUES: Final = 50  # of a segment's column; the others are counted together
OTHERS: Final = "other values"
_COUNTS: Final = Stored(lambda rows: json2counts(rows, np.int64), counts2json)
_START_S: Final = 5.0  # the replay has this long to start before missing requests hold the rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Row):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Document):
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tally(Document):
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
    log_wealth: Mapping[str, Wealth] = field(default_factory=dict)  # of the bets on promises
    # Latencies.
    seen: Annotated[Array, _COUNTS] = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
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


# It is refused when a served score is not what its own bundle computes for the row, when its scores differ from those
# of the live version by more than the plan allows, or when it breaks a promise about failed or slow requests. Latencies
# are not compared with the live version's: recorded requests come in another order and at another pace.
def judge_shadow(plan: Plan, tally: Tally, *, elapsed_s: float) -> tuple[Verdict, str]:
    """Returns the verdict on a candidate that has been answering recorded requests for `elapsed_s`."""
    assert plan.shadow is not None, "called for a plan with recorded requests"
    if tally.mismatch:
        return Verdict.FAIL, f"it does not serve what its bundle computes: {tally.mismatch}; asked twice"
    if tally.e_value >= plan.rollback_at:
        return Verdict.FAIL, f"{finding(plan, tally.broken)}; {_answers(plan, tally)}"
    if tally.unable:
        return Verdict.INVALID, f"recorded requests cannot be replayed: {tally.unable}"
    if tally.rows == 0 and tally.waiting and elapsed_s >= _START_S:
        return Verdict.NO_TRAFFIC, f"{tally.waiting}; it waits for them, or for `serin rollout promote`"
    missing = _missing(plan, tally, elapsed_s)
    if missing and elapsed_s >= plan.deadline_s:
        return Verdict.INCONCLUSIVE, f"not settled by the deadline of {plan.deadline_s:.0f} s: {missing}"
    if missing:
        return Verdict.WAIT, missing
    limit = plan.shadow.max_difference
    if limit is not None and (far := tally.beyond(limit)):
        worst = "; ".join(f"{name}: {difference(found)}" for name, found in far[:3])
        more = f" and {len(far) - 3} more" if len(far) > 3 else ""
        return Verdict.FAIL, (
            f"its scores differ from the live version's by more than {percent(limit)} of the mean score: {worst}{more}"
        )
    return Verdict.PASS, f"{_equal(tally)}; {_differs(tally)}; {_answers(plan, tally)}"


def difference(found: Difference) -> str:
    """How the candidate's scores differ on the rows of a segment, as text."""
    lost = f", {found.lost} scores are not numbers" if found.lost else ""
    if not found.rows:
        return f"0 rows{lost}"
    share = f" ({percent(found.absolute / found.live)})" if found.live else ""
    return f"{found.mean_absolute:.3g}{share} on average, {found.mean:+.3g} with its sign, in {found.rows} rows{lost}"


def _missing(plan: Plan, tally: Tally, elapsed_s: float) -> str:
    """Describes what the step still needs; empty: nothing."""
    assert plan.shadow is not None
    waiting = f"; {tally.waiting}" if tally.waiting else ""
    if tally.rows < plan.shadow.rows:
        return f"{tally.rows} of {plan.shadow.rows} recorded rows are answered{waiting}"
    if elapsed_s < plan.shadow.time_s:
        return (
            f"{elapsed_s:.0f} of {plan.shadow.time_s:.0f} s, {tally.rows} recorded rows are answered{waiting}"
        )
    if tally.counts.error_share > plan.max_error_share:
        return f"{_answers(plan, tally)}; {percent(plan.max_error_share)} may fail"
    return too_slow(plan, tally.counts)


def _equal(tally: Tally) -> str:
    unsteady = f" ({tally.unsteady} only when they were asked again)" if tally.unsteady else ""
    if not tally.compared:
        return f"{tally.rows} recorded rows are answered; it has no graph to compare the scores with"
    return f"{tally.compared} recorded rows are answered as its bundle computes them{unsteady}"


def _differs(tally: Tally) -> str:
    everywhere = [(name, found) for name, found in tally.segments.items() if name.startswith(ALL_ROWS)]
    if not everywhere:
        return "the live version's scores are not recorded"
    _, widest = max(everywhere, key=lambda entry: entry[1].relative)
    return f"its scores differ from the live version's by {difference(widest)}"


def _answers(plan: Plan, tally: Tally) -> str:
    failure = f" ({tally.failure})" if tally.failure else ""
    failed = f"{tally.counts.errors} of {tally.counts.requests} requests failed{failure}"
    return f"{failed}, {latencies(plan, tally.seen)}"
