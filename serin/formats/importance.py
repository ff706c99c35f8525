"""importance.json of a bundle: how much worse the model becomes when a raw column is shuffled."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serin.errors import BundleBroken

FORMAT, VERSION = "serin.importance", 1
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
class Importance:
    """Measured on `rows` rows of the test split; `value` is the metric with nothing shuffled. An rmse's loss is a share
    of it. The most important column comes first."""

    metric: str
    value: float
    rows: int
    repeats: int
    seed: int
    columns: tuple[ColumnImportance, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def read_importance(bundle: Path) -> Importance | None:
    """The importance of a bundle's columns; None for a bundle without, BundleBroken for a file that cannot be read."""
    path = bundle / FILE
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if (document.pop("format"), document.pop("version")) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} version {VERSION} document")
        columns = tuple(ColumnImportance(**entry) for entry in document.pop("columns"))
        return Importance(columns=columns, **document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error
