"""Cuts a gateway's requests into blocks of one second. Pure; the same code where one gateway or several route.

A gateway cuts its own log and sends the blocks; the controller adds the blocks of all gateways (evidence.py). Which
block a line counts in depends on the lines of its gateway alone, not on how they were split into reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from serin.evidence.e_process import Array
from serin.evidence.histogram import bins_of, count
from serin.formats.serving.request import Request
from serin.machine.typed_json import Row
from serin.rollout.decide.blocks import Block, Lines, columns, cut
from serin.rollout.decide.plan import Plan

_FLUSH_S: Final = 2.0  # by then the gateway has written the lines of ended requests
_STEPPED_S: Final = 60.0  # an arrival this far behind the newest means that the clock was set back


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The releases that the evidence is about, at the time of a fold."""

    candidate: str
    stable: str
    epoch: int
    share: float  # the candidate's part of traffic, 0 .. 1
    since: int  # the first epoch that counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark(Row):
    """How far requests were cut: the newest arrival, and the second before which every block is complete."""

    newest: float = 0.0
    complete_to: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Blocks between two steps of the clock. `restart`: the clock was set back before it, and time begins here."""

    blocks: Mapping[int, Block]
    mark: Mark
    restart: Mark | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """What a gateway sends. Several blocks of one second may be sent in turn: they are added. `before`: bin counts of
    stable's latencies before the first weight epoch that counts; None: there were none."""

    blocks: Mapping[int, Block] = field(default_factory=dict)
    before: Array | None = None


def complete_at(now: float, plan: Plan) -> int:
    """Returns the second before which a log that was read at `now` has every line."""
    return math.floor(now - plan.watermark_s - _FLUSH_S)


def cut_requests(
    mark: Mark,
    requests: Sequence[Request],
    *,
    arm: Arm,
    shares: Mapping[int, float],
    plan: Plan,
    now: float | None = None,
) -> tuple[Mark, Cut]:
    """Returns the blocks of the next requests of one gateway. `now`: its log was read to the end then."""
    lines, before = counted_lines(requests, arm=arm, plan=plan)
    blocks: dict[int, Block] = {}
    for piece in pieces(mark, lines, shares, plan):
        mark = piece.mark
        for second, block in piece.blocks.items():
            blocks[second] = blocks[second] + block if second in blocks else block
    if now is not None:
        mark = replace(mark, complete_to=max(mark.complete_to, complete_at(now, plan)))
    return mark, Cut(blocks=blocks, before=before)


def counted_lines(requests: Sequence[Request], *, arm: Arm, plan: Plan) -> tuple[Lines, Array | None]:
    """Returns the lines that count, and bin counts of stable's latencies in earlier weight epochs."""
    lines = columns(requests, candidate=arm.candidate, stable=arm.stable)
    earlier = lines.epoch < arm.since
    if not earlier.any():
        return lines, None
    before = lines.pick(earlier & ~lines.candidate)
    rest = lines.pick(~earlier)
    # A baseline has another load than stable, and so other latencies.
    return rest, None if plan.baseline else count(bins_of(before.us))


def pieces(mark: Mark, lines: Lines, shares: Mapping[int, float], plan: Plan) -> Iterator[Piece]:
    """Yields the blocks of `lines`; a line that comes late counts in the first block that is open then."""
    restart = None
    while len(lines):
        taken = _until_clock_steps_back(lines, max(mark.newest, mark.complete_to))
        if taken == 0:
            newest = float(lines.t[0])
            mark = restart = Mark(newest=newest, complete_to=math.floor(newest - plan.watermark_s))
            continue
        yield _piece(mark, lines.pick(slice(taken)), shares, plan, restart)
        mark = _reached(mark, lines.t[:taken], plan)
        lines, restart = lines.pick(slice(taken, None)), None


def _until_clock_steps_back(lines: Lines, newest: float) -> int:
    running = np.maximum.accumulate(np.maximum(lines.t, newest))
    stepped = np.flatnonzero(running - lines.t > _STEPPED_S)
    return int(stepped[0]) if stepped.size else len(lines)


def _reached(mark: Mark, t: Array, plan: Plan) -> Mark:
    newest = max(float(t.max()), mark.newest)
    return Mark(newest=newest, complete_to=max(math.floor(newest - plan.watermark_s), mark.complete_to))


def _piece(mark: Mark, lines: Lines, shares: Mapping[int, float], plan: Plan, restart: Mark | None) -> Piece:
    running = np.maximum.accumulate(np.maximum(lines.t, mark.newest))
    opens = np.maximum(np.floor(running - plan.watermark_s).astype(np.int64), mark.complete_to)
    second = np.maximum(np.floor(lines.t).astype(np.int64), opens)
    blocks = {which: cut(lines.pick(second == which), shares, plan) for which in np.unique(second).tolist()}
    return Piece(blocks=blocks, mark=_reached(mark, lines.t, plan), restart=restart)
