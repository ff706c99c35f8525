"""statistics.json: how the training rows of each feature's column are distributed, to tell drift by later.

Numbers: counts between edges that are float32 values with a short mantissa, about equally many rows in each bin. Texts
and categories: the commonest values with their counts, and how many others there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serin.formats.schema import Kind
from serin.machine.documents import read_facts
from serin.machine.typed_json import Document


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Statistics(Document, form="serin.statistics"):
    columns: Mapping[str, ColumnStatistics]


def write_statistics(file: Path, columns: Mapping[str, ColumnStatistics]) -> None:
    document = _Statistics(columns=columns).to_json()
    file.write_text(json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


def read_statistics(file: Path) -> Mapping[str, ColumnStatistics]:
    return read_facts(file, _Statistics.from_json).columns
