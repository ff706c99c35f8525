"""importance.json of a bundle: how much worse the model becomes when a raw column is shuffled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serin.machine.documents import read_facts
from serin.machine.typed_json import Document

FILE = "importance.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnImportance:
    """`loss`: how much worse the metric becomes on average; `low` and `high`: the smallest and the largest of the
    repeats."""

    column: str
    source: str
    loss: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance(Document, form="serin.importance"):
    """Measured on `rows` rows of the test split; `value` is the metric with nothing shuffled. An rmse's loss is a share
    of it. The most important column comes first."""

    metric: str
    value: float
    rows: int
    repeats: int
    seed: int
    columns: tuple[ColumnImportance, ...]


def read_importance(bundle: Path) -> Importance | None:
    """The importance of a bundle's columns; None for a bundle without, BundleBroken for a file that cannot be read."""
    path = bundle / FILE
    return read_facts(path, Importance.from_json) if path.is_file() else None
