"""Hand-written dask + pandas: one process per core, frames per row group, small tables sent to every worker.

The cluster is started beforehand and not timed. Exact medians and cuts need whole columns on the client, because dask's
own are approximate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from dask.base import compute
from dask.delayed import delayed
from distributed import Client, LocalCluster

from benchmarks.etl.outputs import SPLITS, split_ends, write_split


def prepare(request: dict[str, Any]) -> None:
    cluster = LocalCluster(n_workers=request["threads"], threads_per_worker=1, dashboard_address=None)
    Client(cluster)


def run(request: dict[str, Any]) -> dict[str, Any]:
    case = request["case"]
    rows = _joined(case, request["decode"][case["table"]]).persist()
    train_time, train_row, valid_time, valid_row = _cuts(rows, case["time"])
    rows = rows.map_partitions(
        _with_split, case["time"], train_time, train_row, valid_time, valid_row
    ).persist()
    train = rows[rows["split"] == 0]
    statistics = _statistics(train, case["numeric"])
    vocabularies = _vocabularies(train, case["categorical"], case["min_count"])
    parts = compute(*rows.map_partitions(_transform, case, statistics, vocabularies).to_delayed())
    made = pd.concat(parts)
    categorical = [*case["categorical"], f"{case['time']}_hour", f"{case['time']}_weekday"]
    out = Path(request["out"])
    for number, split in enumerate(SPLITS):
        of_split = made[made["split"] == number]
        write_split(
            out,
            split,
            numeric=of_split[case["numeric"]].to_numpy(),
            codes=of_split[[f"code_{name}" for name in categorical]].to_numpy(),
            target=of_split["target"].to_numpy(),
            rows=of_split["row"].to_numpy(),
        )
    return {"path": str(out), "numeric": case["numeric"], "categorical": categorical}


def _joined(case: dict[str, Any], columns: list[str]) -> dd.DataFrame:
    file = pq.ParquetFile(case["table"])
    groups = range(file.metadata.num_row_groups)
    starts = np.cumsum([0, *(file.metadata.row_group(group).num_rows for group in groups)])
    others = [
        (
            pd.read_parquet(join["path"], columns=[*join["on"], *join["columns"]]).rename(
                columns=join["columns"]
            ),
            join["on"],
        )
        for join in case["joins"].values()
    ]
    parts = [delayed(_read)(case, columns, others, group, int(starts[group])) for group in groups]
    return dd.from_delayed(parts, meta=_read(case, columns, others, 0, 0).iloc[:0], verify_meta=False)


def _read(
    case: dict[str, Any], columns: list[str], others: list[Any], group: int, start: int
) -> pd.DataFrame:
    frame = pq.ParquetFile(case["table"]).read_row_group(group, columns=columns).to_pandas()
    frame["row"] = np.arange(start, start + len(frame))
    for other, on in others:
        frame = frame.merge(other, on=on, how="left")
    frame = frame[frame[case["target"]].notna()]
    return frame.assign(target=(frame[case["target"]] > case["above"]).astype("float32"))


def _cuts(rows: dd.DataFrame, time: str) -> tuple[Any, int, Any, int]:
    ordered = rows[[time, "row"]].compute().sort_values([time, "row"])
    train_end, valid_end = split_ends(len(ordered))
    first_valid, first_test = ordered.iloc[train_end], ordered.iloc[valid_end]
    return first_valid[time], int(first_valid["row"]), first_test[time], int(first_test["row"])


def _with_split(
    frame: pd.DataFrame, time: str, train_time: Any, train_row: int, valid_time: Any, valid_row: int
) -> pd.DataFrame:
    def from_(when: Any, row: int) -> pd.Series[bool]:
        return (frame[time] > when) | ((frame[time] == when) & (frame["row"] >= row))

    return frame.assign(
        split=from_(train_time, train_row).astype("int8") + from_(valid_time, valid_row).astype("int8")
    )


def _statistics(train: dd.DataFrame, columns: list[str]) -> dict[str, tuple[float, float, float]]:
    """Returns median, mean and standard deviation per column."""
    found = {}
    whole = train[columns].compute()
    for name in columns:
        values = whole[name].astype("float32")
        median = float(values.quantile(0.5, interpolation="lower"))
        filled = values.fillna(median).astype("float64")
        found[name] = (median, float(filled.mean()), float(filled.std(ddof=0)) or 1.0)
    return found


def _vocabularies(train: dd.DataFrame, columns: list[str], min_count: int) -> dict[str, dict[str, int]]:
    counted = compute(*(train[name].value_counts() for name in columns))
    found = {}
    for name, counts in zip(columns, counted, strict=True):
        table = counts[counts >= min_count].rename_axis("value").reset_index(name="n")
        ordered = table.sort_values(["n", "value"], ascending=[False, True])["value"]
        found[name] = {value: code for code, value in enumerate(ordered, start=2)}
    return found


def _transform(
    frame: pd.DataFrame,
    case: dict[str, Any],
    statistics: dict[str, tuple[float, float, float]],
    vocabularies: dict[str, dict[str, int]],
) -> pd.DataFrame:
    made = frame[["row", "split", "target"]].copy()
    for name in case["numeric"]:
        median, mean, deviation = statistics[name]
        values = frame[name].astype("float32").fillna(median)
        made[name] = ((values - np.float32(mean)) / np.float32(deviation)).astype("float32")
    for name in case["categorical"]:
        codes = frame[name].map(vocabularies[name]).fillna(1).astype("int32")
        made[f"code_{name}"] = codes.where(frame[name].notna(), 0)
    time = pd.to_datetime(frame[case["time"]])
    made[f"code_{case['time']}_hour"] = (time.dt.hour + 1).astype("int32")
    made[f"code_{case['time']}_weekday"] = (time.dt.weekday + 1).astype("int32")
    return made
