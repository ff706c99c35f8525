"""Decides whether a burn began with a release, so that returning to the version before it helps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from serin.monitoring.objectives.burn import WINDOWS, Objective, Share, add, burning_since, firing_pair

FIRST_S: Final = 3_600.0  # after its promotion; a burn that begins later has another cause
BEFORE_S: Final = 21_600.0  # of the previous version's traffic are looked at
_LEAST_BEFORE: Final = 30  # requests of the previous version; with fewer nothing is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one version's clients saw from `t` on."""

    t: float
    version: int
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`why`: a sentence for the journal and the alert."""

    guilty: bool
    why: str


def blame(
    objective: Objective, rows: Sequence[Row], *, live: int, previous: int, promoted: float, now: float
) -> Verdict:
    """Compares the live version since its first request with the previous one before and beside it.

    `rows`: oldest first. The release is to blame when its own requests burn the budget too fast, the burn began before
    it was promoted or in the hour after, and the previous version kept the promise in its last six hours.
    """
    ours = [row for row in rows if row.version == live]
    recent = {window: add(row.share for row in ours if row.t >= now - window) for window in WINDOWS}
    pair = firing_pair(objective, recent)
    if pair is None or pair.severity != "page":
        return Verdict(guilty=False, why=f"version {live} alone does not burn the budget too fast")
    since = burning_since(objective, [(row.t, row.share) for row in ours], pair.threshold)
    if since is None or since > promoted + FIRST_S:
        return Verdict(
            guilty=False, why=f"the burn began more than an hour after the release of version {live}"
        )
    before = add(row.share for row in rows if row.version == previous and row.t > since - BEFORE_S)
    if before.requests < _LEAST_BEFORE:
        return Verdict(
            guilty=False, why=f"version {previous} had only {before.requests} requests to compare with"
        )
    if objective.burn(before) >= 1.0:
        return Verdict(
            guilty=False,
            why=f"version {previous} broke the promise too: {before.bad_share:.2%} of its requests were bad",
        )
    what = "fail" if objective.name == "availability" else "are slow"
    return Verdict(
        guilty=True,
        why=f"since the release of version {live} too many requests {what} "
        f"({recent[pair.long_s].bad_share:.2%}; version {previous}: {before.bad_share:.2%})",
    )
