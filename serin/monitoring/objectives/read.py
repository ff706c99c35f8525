"""Reads a model's objectives for people: `read_objectives` for status, `serin slo`, console and Prometheus.

What the live version promises is kept for readers that have no store: `<home>/watch/objectives/<model>.json`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from serin.machine.durable import make_private, write_whole
from serin.machine.typed_json import Document
from serin.monitoring.history.read import Sums, WindowSums, first_counted, window_sums
from serin.monitoring.objectives.burn import (
    PAIRS,
    PERIOD_S,
    WINDOWS,
    Objective,
    Share,
    add,
    budget_left,
    burn_rates,
    firing_pair,
)
from serin.monitoring.rollbacks import Rollback, read_rollbacks


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBurn:
    """`threshold`: an alert needs this burn rate in both windows of the pair; `pair_s`: the other window."""

    window_s: int
    pair_s: int
    threshold: float
    burn: float
    requests: int
    bad: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveView:
    """`budget_left`: share of the budget of 30 days, negative when overspent; None without requests."""

    name: str
    target: float
    limit_ms: float | None
    requests: int
    bad: int
    budget_left: float | None
    windows: tuple[WindowBurn, ...]
    fires: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectivesView:
    """`gone`: window in seconds -> the share of requests whose client went away before it had waited as long as
    promised. They count for no objective."""

    model: str
    release: str
    objectives: tuple[ObjectiveView, ...]
    rollbacks: tuple[Rollback, ...]
    gone: Mapping[int, float] = field(default_factory=dict)


def read_objectives(home: Path, model: str, *, now: float | None = None) -> ObjectivesView | None:
    """Returns budgets and burn rates; None for a model that the watcher has never seen live."""
    state = ObjectivesState.of(home, model)
    if not state.objectives:
        return None
    now = time.time() if now is None else now
    sums, age_s = window_sums(home, model, now, (*WINDOWS, PERIOD_S)), counted_for(home, model, now)
    return ObjectivesView(
        model=model,
        release=state.release,
        objectives=tuple(
            _view(objective, shares_of(objective, sums), age_s) for objective in state.objectives
        ),
        rollbacks=read_rollbacks(home, model),
        gone={
            window: add(Share(requests, gone) for requests, _, _, gone in releases.values()).bad_share
            for window, releases in sums.items()
        },
    )


def budget_words(view: ObjectiveView) -> str:
    """A budget in a few words, such as "availability 82% left"."""
    if view.budget_left is None:
        return f"{view.name} not used yet"
    state = f"{view.budget_left:.0%} left" if view.budget_left > 0 else "used up"
    return f"{view.name} {state}{', burns too fast' if view.fires else ''}"


def counted_for(home: Path, model: str, now: float) -> float:
    """Returns for how many seconds the model's requests have been counted."""
    first = first_counted(home, model)
    return 0.0 if first is None else max(0.0, now - first)


def shares_of(objective: Objective, sums: WindowSums) -> dict[int, Share]:
    """Returns the shares of bad requests by window, over all releases."""
    return {
        window: add(share_of(objective, counted) for counted in releases.values())
        for window, releases in sums.items()
    }


def share_of(objective: Objective, counted: Sums) -> Share:
    """The share of bad requests. Those whose client went away are neither good nor bad."""
    requests, errors, slow, gone = counted
    return Share(requests - gone, errors if objective.name == "availability" else slow)


def _view(objective: Objective, shares: dict[int, Share], age_s: float) -> ObjectiveView:
    period, rates = shares[PERIOD_S], burn_rates(objective, shares, age_s)
    return ObjectiveView(
        name=objective.name,
        target=objective.target,
        limit_ms=objective.limit_ms,
        requests=period.requests,
        bad=period.bad,
        budget_left=budget_left(objective, period, age_s),
        windows=tuple(
            WindowBurn(
                window_s=window,
                pair_s=other,
                threshold=pair.threshold,
                burn=rates[window],
                requests=shares[window].requests,
                bad=shares[window].bad,
            )
            for pair in PAIRS
            for window, other in ((pair.short_s, pair.long_s), (pair.long_s, pair.short_s))
        ),
        fires=firing_pair(objective, shares, age_s) is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectivesState(Document, form="serin.objectives"):
    """`release`: the live one, whose promises these are."""

    model: str
    release: str = ""
    objectives: tuple[Objective, ...] = ()

    @classmethod
    def of(cls, home: Path, model: str) -> Self:
        """A missing or damaged file is an empty state: the next tick of the watcher writes it."""
        return cls.load_file(_path(home, model)) or cls(model=model)

    def save(self, home: Path) -> None:
        path = _path(home, self.model)
        make_private(path.parent)
        write_whole(path, self.dump())


def _path(home: Path, model: str) -> Path:
    return home / "watch" / "objectives" / f"{model}.json"
