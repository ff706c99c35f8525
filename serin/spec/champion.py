"""The section `champion`: when a retrained model may replace the live one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from serin.spec.export import Metric
from serin.spec.section import Section


class ChampionSpec(Section):
    """When a new version may be published beside a live one: unless it is worse by more than `max_loss` on the newest
    test rows, as shown by a paired bootstrap at `confidence`."""

    metric: Metric | Literal["average_precision"] | None = None
    """The metric. By default the task's own: auc, accuracy or rmse. `average_precision` suits rare positives."""
    max_loss: float = Field(default=0.0, ge=0)
    """The largest allowed loss, in units of the metric; for rmse, as a share of it."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """How sure the bootstrap must be of a larger loss before the new version is refused."""
    max_rows: int = Field(default=100_000, ge=100)
    """The number of test rows that are compared, the newest first."""
