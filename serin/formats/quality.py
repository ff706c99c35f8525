"""quality.json of a bundle: how good the version is on its test rows, to compare live rows with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from serin.formats.gate import Measured
from serin.machine.documents import read_facts
from serin.machine.typed_json import Document, Stored

FILE = "quality.json"


def _measured2json(each: Measured) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in (each.value, each.low, each.high)]


def _json2measured(row: Sequence[float | None]) -> Measured:
    value, low, high = (
        unknown if end is None else float(end) for end, unknown in zip(row, _UNKNOWN, strict=True)
    )
    return Measured(value=value, low=low, high=high)


_UNKNOWN = (math.nan, -math.inf, math.inf)
Metrics = Mapping[str, Annotated[Measured, Stored(_json2measured, _measured2json)]]
"""Metrics by name, in JSON as [value, low, high]; what is not known is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReference(Document, form="serin.quality"):
    """`loss`: the mean of the bounded loss per row (`loss_name`) on `rows` test rows; a regression's squared error is
    divided by `scale` and cut at `clip`. `reliability`: mean score, rate and rows of bins of the test rows. `block_s`:
    the seconds of a block in which rows may depend on each other. `segments`: the metrics by segment."""

    rows: int
    loss_name: str
    loss: float
    scale: float
    clip: float
    block_s: float
    metrics: Metrics
    reliability: tuple[tuple[float, float, int], ...] = ()
    segments: Mapping[str, Metrics] = field(default_factory=dict)


def read_quality_reference(bundle: Path) -> QualityReference | None:
    """The reference of a bundle; None for one that was exported without it."""
    path = bundle / FILE
    return read_facts(path, QualityReference.from_json) if path.is_file() else None
