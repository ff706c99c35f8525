"""Compiles the kernels of the GPU that a dataset needs, by building a small one: cupy compiles each when it is first
used, which takes about a fifth of a second, and keeps it for later processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.etl.build import build_dataset
from serin.spec.load import load_spec
from serin.store.store import Store

_ROWS = 60_000  # cupy counts and places rows of large arrays by other kernels
_NUMBERS = {"wide": "float64", "narrow": "float32", "whole": "int64", "byte": "int8"}
_OTHERS = {"first": "float64", "second": "float32", "third": "int64", "fourth": "float32"}


def compile_kernels() -> None:
    """Builds datasets with every step and every relational operation, and throws them away. Raises EngineFailed where
    there is no GPU."""
    with tempfile.TemporaryDirectory(prefix="serin-kernels-") as place:
        folder = Path(place)
        _write_tables(folder)
        for section in ({}, {"unique": {"by": ["key", "time"]}, "windows": [_WINDOW]}):
            spec = load_spec(_document(folder, section))
            build_dataset(spec.data, spec.features, spec.etl, store=Store(str(folder / "store")))


def _write_tables(folder: Path) -> None:
    chance = np.random.default_rng(0)

    def some(values: Any) -> pa.Array:
        return pa.array(values, mask=chance.random(_ROWS) < 0.1)

    keys = chance.integers(0, 40, _ROWS)
    day = 86_400_000_000
    main = {
        **{
            name: some((chance.normal(0, 30, _ROWS) + keys).clip(-100, 100).astype(kind))
            for name, kind in {**_NUMBERS, **_OTHERS}.items()
        },
        "flag": some(keys % 2 == 0),
        "text": some([f"text {key}" for key in keys]),
        "key": pa.array(keys),
        "time": pa.array(np.arange(_ROWS) * (day // 24), pa.timestamp("us")),
        "late": pa.array(chance.integers(0, 2, _ROWS)),
    }
    pq.write_table(pa.table(main), folder / "main.parquet")
    other = {"key": pa.array(np.arange(40)), "size": pa.array(np.arange(40) / 3)}
    pq.write_table(pa.table(other), folder / "other.parquet")
    since = {
        "key": other["key"],
        "since": pa.array(np.arange(40) * day, pa.timestamp("us")),
        "price": other["size"],
    }
    pq.write_table(pa.table(since), folder / "prices.parquet")


_WINDOW = {
    "by": "key",
    "span": "90d",
    "make": {"past": "mean(narrow)", "before": "lag(whole)", "least": "min(wide)", "seen": "count()"},
}


def _document(folder: Path, section: dict[str, Any]) -> dict[str, Any]:
    made = ["past", "before", "least", "seen"] if section else []
    statistics = {"group_stats": {"by": "text", "stats": ["mean", "std", "min", "max"]}}
    return {
        "name": "kernels",
        "data": {
            "tables": {name: str(folder / f"{name}.parquet") for name in ("main", "other", "prices")},
            "joins": [
                {"with": "other", "on": "key", "columns": ["size"]},
                {"with": "prices", "on": "key", "as_of": {"column": "time", "there": "since"}, "columns": ["price"]},
            ],
            "derived": {"ratio": "narrow / wide", "sum": "whole + byte"},
            "where": "byte > -100 or is_null(byte)",
            "target": {"expression": "late", "task": "binary"},
            "time": "time",
            **section,
        },
        "features": [
            {"columns": [*_NUMBERS, "ratio", "sum", "size", "price", *made], "steps": ["fill_median", "normalize"]},
            {"columns": ["first"], "steps": [{"fill_median": {"indicator": True}}, {"clip": {"q": [0.01, 0.99]}}]},
            {"columns": ["second"], "steps": ["fill_mode", "log1p", "robust_scale"]},
            {"columns": ["narrow"], "steps": [{"bucketize": {"quantiles": 5}}]},
            {"columns": ["third"], "steps": ["fill_median", "min_max"]},
            {"columns": ["text", "key", "flag"], "steps": [{"categorify": {"min_count": 2, "buckets": 3}}]},
            {"columns": ["text"], "steps": [{"target_encode": {"smoothing": 5}}, "normalize"]},
            {"columns": ["text"], "steps": ["count_encode", "log1p"]},
            {"columns": ["fourth"], "steps": [statistics, "normalize"]},
            {"columns": ["text"], "steps": [{"one_hot": {"max_size": 4}}]},
            {"columns": ["third"], "steps": [{"hash_bucket": 16}]},
            {"columns": ["key"], "steps": ["ordinal", "fill_missing"]},
            {"columns": ["time"], "steps": [{"cyclical": ["hour"]}]},
            {"columns": ["time"], "steps": [{"date_parts": ["hour", "weekday", "day", "month"]}]},
        ],
        "etl": {"engine": "cuda"},
    }  # fmt: skip
