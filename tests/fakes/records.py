"""Recorded requests of the small hand-made bundle, as the recorder writes them."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from serin.formats.captures import Part
from serin.formats.schema import INT64_NULL
from serin.formats.wire import Array
from serin.store.artifacts import Release
from tests.kit.recorded_parts import write_part
from tests.unit.serving import bundles


def record(
    home: Path,
    release: Release,
    columns: dict[str, Array],
    scores: Array,
    *,
    sizes: Sequence[int] | None = None,
    t: float | None = None,
    name: str = "r",
    source: str = "live",
) -> list[Part]:
    """Writes requests with so many rows each (one by default) that arrived at `t`, answered with `scores`."""
    rows = len(scores)
    sizes = [1] * rows if sizes is None else sizes
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    arrived = int((time.time() if t is None else t) * 1e6)
    table = {
        "_id": [f"{name}{number}" for number in numbers],
        "_row": pa.array(np.concatenate([np.arange(size) for size in sizes]), pa.int32()),
        "_t": pa.array([arrived] * rows, pa.timestamp("us", "UTC")),
        "_release": [release.name] * rows,
        "_source": [source] * rows,
        "_status": pa.array([200] * rows, pa.int32()),
        **{column: natural(values.reshape(-1)) for column, values in columns.items()},
        "_answer_score": pa.array(scores.reshape(-1), pa.float32()),
    }
    return write_part(home, release.model, release.version, pa.table(table))


def natural(values: Array) -> pa.Array:
    """Wire values with real nulls."""
    if values.dtype == object:
        return pa.array(values, pa.string(), mask=values == "")
    if values.dtype == np.float32:
        return pa.array(values, pa.float32(), mask=np.isnan(values))
    if values.dtype == np.int8:
        return pa.array(values == 1, pa.bool_(), mask=values == -1)
    return pa.array(values, pa.int64(), mask=values == INT64_NULL)


def recorded_rows(count: int, seed: int = 0) -> dict[str, Array]:
    """Rows after a drift: another mix of carriers, warmer, some nulls."""
    columns, draw = bundles.rows(count, seed=seed), np.random.default_rng(seed)
    carriers = np.array(["AA", "UA", "", "new"], dtype=object)
    columns["carrier"] = (
        draw.choice(carriers, size=count, p=[0.4, 0.3, 0.1, 0.2]).astype(object).reshape(-1, 1)
    )
    columns["temp"] = (columns["temp"] + 1.5).astype(np.float32)
    return columns
