"""Polars plans that cudf-polars runs on a GPU: each statistic is a plan, codes come from joins with the counted values,
and rows are sorted once at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.etl.outputs import SPLITS, split_ends, write_split
from benchmarks.etl.polars_peer import z_scores


def run(request: dict[str, Any]) -> dict[str, Any]:
    """`executor`: in-memory or streaming."""
    case, engine = request["case"], pl.GPUEngine(executor=request["executor"], raise_on_fail=True)
    time = case["time"]
    frame = _joined(case, request["columns"]).collect(engine=engine)
    train_end, valid_end = split_ends(len(frame))
    moments = frame.lazy().select(pl.col(time).cast(pl.Int64).sort()).collect(engine=engine)[time]
    begins = [int(moments[train_end]), int(moments[valid_end])]
    whole = pl.col(time).cast(pl.Int64)
    split = (whole >= begins[0]).cast(pl.Int8) + (whole >= begins[1]).cast(pl.Int8)
    frame = frame.lazy().with_columns(split.alias("split")).collect(engine=engine)
    train = frame.lazy().filter(pl.col("split") == 0)
    parts = {
        f"{time}_hour": pl.col(time).dt.hour().cast(pl.Int32) + 1,
        f"{time}_weekday": pl.col(time).dt.weekday().cast(pl.Int32),
    }
    made = frame.lazy()
    for name in case["categorical"]:
        made = made.join(_places(train, name, case["min_count"]), on=name, how="left")
    codes = [
        pl.when(pl.col(name).is_null())
        .then(pl.lit(0, pl.Int32))
        .otherwise(pl.col(f"{name} place").cast(pl.Int32).fill_null(1))
        .alias(name)
        for name in case["categorical"]
    ]
    features = [*z_scores(train, case["numeric"], engine), *codes]
    dates = [each.alias(name) for name, each in parts.items()]
    made = made.select("row", "split", "target", *features, *dates).sort("row")
    rows, categorical = made.collect(engine=engine), [*case["categorical"], *parts]
    for number, name in enumerate(SPLITS):
        own = rows.filter(pl.col("split") == number)
        write_split(
            Path(request["out"]),
            name,
            numeric=own.select(case["numeric"]).to_numpy(order="c"),
            codes=own.select(categorical).to_numpy(order="c"),
            target=own["target"].to_numpy(),
            rows=own["row"].to_numpy(),
        )
    return {"path": request["out"], "numeric": case["numeric"], "categorical": categorical}


def _joined(case: dict[str, Any], columns: list[str]) -> pl.LazyFrame:
    frame = pl.scan_parquet(f"{case['table']}/*.parquet", row_index_name="row").select("row", *columns)
    for join in case["joins"].values():
        other = pl.scan_parquet(join["path"]).select(*join["on"], *join["columns"]).rename(join["columns"])
        frame = frame.join(other, on=join["on"], how="left")
    made = [(pl.col(one) - pl.col(other)).alias(name) for name, (one, other) in case["differences"].items()]
    target = (pl.col(case["target"]) > case["above"]).cast(pl.Float32).alias("target")
    return frame.with_columns(target, *made)


def _places(train: pl.LazyFrame, name: str, min_count: int) -> pl.LazyFrame:
    counted = train.select(name).drop_nulls().group_by(name).agg(pl.len().alias("count"))
    kept = counted.filter(pl.col("count") >= min_count).sort(["count", name], descending=[True, False])
    return kept.select(name).with_row_index(f"{name} place", offset=2)
