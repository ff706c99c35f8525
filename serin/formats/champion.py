"""champion.json: how a candidate compared with the live version when it was published."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from serin.machine.typed_json import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One comparison: `loss` is what the candidate loses against the live model (below 0: it gains), with its bounds
    at the confidence. An rmse's loss is a share of the live model's."""

    rows: int
    candidate: float
    live: float
    loss: float
    at_least: float  # the loss is larger than this, surely
    at_most: float
    worse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChampionReport(Document, form="serin.champion", version=2):
    """champion.json."""

    verdict: Literal["better or equal", "not compared", "approved"]
    reason: str
    live_version: int | None = None
    metric: str | None = None
    max_loss: float | None = None
    confidence: float | None = None
    overall: Contest | None = None
    segments: dict[str, Contest] = field(default_factory=dict)
    approved_by: str | None = None
