"""Selects the decisions of a large journal that are still needed. Pure.

A rollout that is held accumulates evidence as long as it is held. A controller resumes from the newest line; `report`
and `replay` need the turning points, and the evidence at some times between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from serin.formats.serving.journal import Decision

_TURNS: Final = 500  # of one rollout: holds that come and go
_POINTS: Final = (20, 200)  # evidence over time: of an earlier rollout, of the newest


def worth_keeping(decisions: Sequence[Decision]) -> set[int]:
    """Returns the numbers of the decisions to keep.

    Every command and every change of phase, step, weights or plan is kept, and the newest decision.
    """
    rollouts = [list(rows) for _, rows in groupby(decisions, key=lambda decision: decision.rollout)]
    return {seq for rows in rollouts for seq in _of_one(rows, points=_POINTS[rows[-1] is rollouts[-1][-1]])}


def _of_one(rows: Sequence[Decision], *, points: int) -> Iterator[int]:
    turns, rest = [], []
    before: Decision | None = None
    for row in rows:
        if before is None or row.command or _course(row) != _course(before):
            yield row.seq
        elif row.state.get("hold") != before.state.get("hold"):
            turns.append(row)
        else:
            rest.append(row)
        before = row
    yield rows[-1].seq
    yield from _spread(turns, _TURNS)
    yield from _spread(rest, points)


def _course(row: Decision) -> tuple[object, ...]:
    return row.phase, row.step, row.state.get("epoch"), row.state.get("approved"), row.state.get("plan")


def _spread(rows: Sequence[Decision], most: int) -> Iterator[int]:
    """Returns at most `most` rows, spread evenly over time and not over their number: old ones must not go first."""
    if len(rows) <= most:
        yield from (row.seq for row in rows)
        return
    begin, span = rows[0].t, (rows[-1].t - rows[0].t) or 1.0
    by_time = {min(int(most * (row.t - begin) / span), most - 1): row.seq for row in rows}
    yield from by_time.values()
