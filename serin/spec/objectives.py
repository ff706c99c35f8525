"""The section `objectives`: the one promise to clients. Tuning, rollouts and the watcher read it."""

from __future__ import annotations

from pydantic import Field

from serin.spec.section import Section

PAGE_BURN = 6.0
"""So many times the budget is too fast: the watcher pages, and a rollout rolls its candidate back."""


class ObjectivesSpec(Section):
    """What is promised to clients over 30 days. `serin tune` keeps to it, rollouts are judged by it, and the watcher
    alerts when it is in danger."""

    availability: float = Field(default=0.999, gt=0, lt=1)
    """The share of requests that must be answered without a server error."""
    latency_ms: float = Field(default=50.0, gt=0)
    """The promised latency in milliseconds. A request that takes longer is slow."""
    latency_share: float = Field(default=0.99, gt=0, lt=1)
    """The share of requests that must be answered within `latency_ms`."""


def page_share(target: float) -> float:
    """The share of bad requests at which a budget burns `PAGE_BURN` times too fast. At most halfway from the budget to
    all requests: a promise about few of them can be broken too."""
    budget = 1.0 - target
    return min(PAGE_BURN * budget, (1.0 + budget) / 2)
