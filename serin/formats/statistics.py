"""statistics.json: how the training rows of each feature's column are distributed, to tell drift by later.

Numbers: counts between edges that are float32 values with a short mantissa, about equally many rows in each bin. Texts
and categories: the commonest values with their counts, and how many others there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from serin.errors import BundleBroken
from serin.formats.schema import Kind

FORMAT, VERSION = "serin.statistics", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberStatistics:
    """counts[i] rows are in edges[i] <= value < edges[i + 1]; infinite values are in none of them."""

    kind: Kind
    rows: int
    nulls: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryStatistics:
    """`others`: rows with a value that is not among `values`."""

    kind: Kind
    rows: int
    nulls: int
    distinct: int
    values: tuple[str | int, ...]
    counts: tuple[int, ...]
    others: int


ColumnStatistics = NumberStatistics | CategoryStatistics


def write_statistics(file: Path, columns: Mapping[str, ColumnStatistics]) -> None:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "columns": {name: _entry(each) for name, each in columns.items()},
    }
    file.write_text(json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


def _entry(column: ColumnStatistics) -> dict[str, Any]:
    """As `asdict`, which would copy every number."""
    return {each.name: getattr(column, each.name) for each in fields(column)}


def read_statistics(file: Path) -> dict[str, ColumnStatistics]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(f"not a {FORMAT} version {VERSION} document")
        return {name: _column(entry) for name, entry in document["columns"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleBroken(path=str(file), reason=f"{type(error).__name__}: {error}") from error


def _column(entry: Mapping[str, Any]) -> ColumnStatistics:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return NumberStatistics(**values) if "edges" in values else CategoryStatistics(**values)
