"""quality.json of a bundle: how good the version is on its test rows, to compare live rows with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from serin.errors import BundleBroken
from serin.formats.groups import Measured

FORMAT, VERSION = "serin.quality", 1
FILE = "quality.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReference:
    """`loss`: the mean of the bounded loss per row (`loss_name`) on `rows` test rows; a regression's squared error is
    divided by `scale` and cut at `clip`. `reliability`: mean score, rate and rows of bins of the test rows. `block_s`:
    the seconds of a block in which rows may depend on each other. `segments`: the metrics by segment."""

    rows: int
    loss_name: str
    loss: float
    scale: float
    clip: float
    block_s: float
    metrics: Mapping[str, Measured]
    reliability: tuple[tuple[float, float, int], ...] = ()
    segments: Mapping[str, Mapping[str, Measured]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        document["metrics"] = metrics2json(self.metrics)
        document["segments"] = {name: metrics2json(each) for name, each in self.segments.items()}
        return {"format": FORMAT, "version": VERSION, **document}


def metrics2json(metrics: Mapping[str, Measured]) -> dict[str, list[float | None]]:
    """Metrics as [value, low, high]; an end that is not known is null."""
    return {
        name: [_finite(each.value), _finite(each.low), _finite(each.high)] for name, each in metrics.items()
    }


def json2metrics(value: Mapping[str, Any]) -> dict[str, Measured]:
    return {
        name: Measured(value=float(found), low=_end(low, -math.inf), high=_end(high, math.inf))
        for name, (found, low, high) in value.items()
    }


def _end(value: float | None, unknown: float) -> float:
    return unknown if value is None else float(value)


def read_quality_reference(bundle: Path) -> QualityReference | None:
    """The reference of a bundle; None for one that was exported without it."""
    path = bundle / FILE
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if (document.pop("format"), document.pop("version")) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} version {VERSION} document")
        document["metrics"] = json2metrics(document["metrics"])
        document["segments"] = {name: json2metrics(each) for name, each in document["segments"].items()}
        document["reliability"] = tuple(tuple(each) for each in document["reliability"])
        return QualityReference(**document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
