"""The last step of a dataset: headers, digests, and the files that describe it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from serin.features.plan import FeaturePlan
from serin.formats.dataset import FEATURES, DatasetDescription, write_dataset
from serin.formats.shards import seal_part


def seal_dataset(
    folder: Path,
    description: DatasetDescription,
    plan: FeaturePlan,
    lookups: Sequence[pa.Table],
    *,
    threads: int,
) -> str:
    """Finishes the folder, dataset.json last; the digest over all that is promised to be equal everywhere (class A)."""
    categorical = [output.name for output in plan.categorical]
    parts = [(name, index) for name, split in description.splits.items() for index in range(split.parts)]

    def seal(part: tuple[str, int]) -> str:
        name, index = part
        rows = description.splits[name].rows
        return seal_part(folder / name, index, rows, plan.numeric, categorical, list(plan.approximate))

    with ThreadPoolExecutor(threads) as pool:
        parts_digests = list(pool.map(seal, parts))
    content = description.to_json()
    for key in ("digest", "sources"):
        del content[key]
    document = {
        "dataset": content,
        "features": plan.to_json(exact_only=True),
        "lookups": [_table_digest(table) for table in lookups],
        "parts": parts_digests,
    }
    digest = hashlib.sha256(canonical(document)).hexdigest()
    features = json.dumps(plan.to_json(), allow_nan=False, ensure_ascii=False)
    (folder / FEATURES).write_text(features + "\n", encoding="utf-8")
    write_dataset(folder, replace(description, digest=digest))
    return digest


def canonical(document: Any, default: Any = None) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), default=default).encode()


def _table_digest(table: pa.Table) -> str:
    """Of the values, however Arrow happens to lay them out."""
    digest = hashlib.sha256()
    for name in table.column_names:
        column = table.column(name)
        digest.update(canonical([name, str(column.type), column.to_pylist()], default=str))
    return digest.hexdigest()
