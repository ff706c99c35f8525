"""Tables made of what tends to differ between machines: nulls, NaN, infinities, large integers, unicode, zones."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec

WORDS = [
    "zürich",
    "naïve",
    "日本",
    "🐤",
    "a",
    "A",
    "ab",
    "",
    "Ω",
    "e\u0301",
    "é",
    " ",
    "\t",
    "0",
    "nan",
    "null",
]


def write_awkward_tables(folder: Path, rows: int, seed: int = 0) -> PipelineSpec:
    """main in three files (one row; rows without a target; the rest in small row groups) and a table of places."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    parts = [_main(random, 1, 0), _main(random, 300, 1, targets=False), _main(random, rows, 301)]
    for number, part in enumerate(parts):
        pq.write_table(part, folder / f"main-{number}.parquet", row_group_size=max(1, rows // 7))
    places = pa.table(
        {
            "word": pa.array([word for word in WORDS if word]),
            "height": pa.array([None if index % 5 == 0 else index / 3 for index in range(len(WORDS) - 1)]),
            "people": pa.array([2**53 + index for index in range(len(WORDS) - 1)], pa.int64()),
        }
    )
    pq.write_table(places, folder / "places.parquet")
    return _spec(folder)


def _main(random: np.random.Generator, rows: int, first: int, *, targets: bool = True) -> pa.Table:
    numbers = random.normal(size=rows) * 10.0 ** random.integers(-40, 38, rows)
    odd = np.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3.4e38, -3.4e38, 1.0, 2.0**-126])
    floats = np.where(random.random(rows) < 0.3, random.choice(odd, rows), numbers)
    large = random.integers(-(2**62), 2**62, rows) | 1
    codes = random.integers(0, 50, rows) * 7_919_113_517_021  # far apart: no table by value
    day = 86_400_000_000
    times = (first + np.arange(rows)) * 7_777_777 * 1000 + random.integers(-day, day, rows)
    words = random.choice(np.asarray(WORDS, dtype=object), rows)
    late = np.where(np.arange(rows) > 0.9 * rows, "late-", "")  # seen in the test split alone
    names = [f"{prefix}{number}" for prefix, number in zip(late, random.integers(0, 40, rows), strict=True)]
    return pa.table(
        {
            "ordinary": _some_null(random, random.normal(3, 2, rows).astype(np.float32)),
            "second": _some_null(random, random.exponential(2, rows).astype(np.float32)),
            "third": _some_null(random, random.integers(0, 30, rows).astype(np.int8)),
            "extreme": _some_null(random, floats.astype(np.float32)),
            "wide": _some_null(random, numbers * 1e5),  # float64, some beyond float32
            "large": _some_null(random, large),
            "small": _some_null(random, random.integers(-5, 5, rows).astype(np.int16)),
            "yes": _some_null(random, random.random(rows) < 0.4),
            "word": _some_null(random, words.tolist(), pa.string()),
            "name": _some_null(random, names, pa.string()),
            "code": _some_null(random, codes),
            "level": _some_null(random, random.integers(0, 9, rows).astype(np.int32)),
            "when": pa.array(times, pa.timestamp("us", tz="Europe/Berlin")),
            "seen": _some_null(random, times * 1000 + 1, pa.timestamp("ns", tz="America/New_York")),
            "y": _some_null(random, random.random(rows)) if targets else pa.nulls(rows, pa.float64()),
        }
    )


def _some_null(random: np.random.Generator, values: Any, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, kind, mask=random.random(len(values)) < 0.1)


def _spec(folder: Path) -> PipelineSpec:
    numbers = ["ordinary", "extreme", "wide", "large", "small", "yes", "height", "people"]
    return load_spec(
        {
            "name": "awkward",
            "data": {
                "tables": {"main": str(folder / "main-*.parquet"), "places": str(folder / "places.parquet")},
                "joins": [
                    {"with": "places", "on": "word", "columns": ["height", "people"], "source": "lookup"}
                ],
                "target": {"expression": "y > 0.5", "task": "binary"},
                "time": "when",
            },
            "features": [
                {
                    "columns": numbers,
                    "steps": ["fill_median", {"clip": {"q": [0.01, 0.99]}}, "normalize"],
                },
                {
                    "columns": ["word", "name", "code"],
                    "steps": [{"categorify": {"min_count": 2, "buckets": 3}}],
                },
                {"columns": ["level"], "steps": ["categorify"]},
                {
                    "columns": ["second"],
                    "steps": [{"fill_median": {"indicator": True}}, "log1p", "min_max"],
                },
                {"columns": ["third"], "steps": ["fill_mode", "robust_scale"]},
                {"columns": ["wide"], "steps": [{"bucketize": {"quantiles": 5}}]},
                {"columns": ["name"], "steps": [{"target_encode": {"smoothing": 5}}, "normalize"]},
                {"columns": ["word"], "steps": ["count_encode", "log1p"]},
                {"columns": ["ordinary"], "steps": [{"group_stats": {"by": "name"}}, "normalize"]},
                {"columns": ["word"], "steps": [{"one_hot": {"max_size": 4}}]},
                {"columns": ["large"], "steps": [{"hash_bucket": 16}]},
                {"columns": ["seen"], "steps": [{"cyclical": ["hour"]}]},
                {"columns": ["when", "seen"], "steps": [{"date_parts": ["hour", "weekday", "day", "month"]}]},
            ],
        }
    )
