"""Plain cuDF as hand-written for one GPU: the same rows, codes and z-scores, the same files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.etl.outputs import SPLITS, split_ends, write_split
from serin.etl.engines.device import store_rows
from serin.formats.shards import Rows
from serin.machine.durable import sync

_SYNCS_AT_ONCE = 16


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Runs the whole case and writes the files. `our_writer`: with Serin's writer, parts in parallel through pinned
    memory. `durable`: waits until everything is on the disk, as Serin does; else the page cache is enough."""
    import cupy

    case = request["case"]
    frame, codes = make(case, request["files"])
    out = Path(request["out"])
    splits = [frame["split"].values == number for number in range(len(SPLITS))]
    rows = cupy.arange(len(frame))

    def write(number: int) -> None:
        chosen = splits[number]
        if request.get("our_writer"):
            made = Rows(
                num=cupy.stack([frame[name].values[chosen] for name in case["numeric"]], axis=1),
                cat=cupy.stack([frame[name].values[chosen] for name in codes], axis=1),
                target=frame["target"].values[chosen],
                rows=rows[chosen],
            )
            store_rows([(out / SPLITS[number], 0, made)])
            return
        write_split(
            out,
            SPLITS[number],
            numeric=cupy.stack([frame[name].values[chosen] for name in case["numeric"]], axis=1).get(),
            codes=cupy.stack([frame[name].values[chosen] for name in codes], axis=1).get(),
            target=frame["target"].values[chosen].get(),
            rows=rows[chosen].get(),
        )

    hurry = nullcontext() if request.get("durable") else patch("serin.etl.engines.device.begin_sync_beside")
    with hurry, ThreadPoolExecutor(len(SPLITS)) as pool:
        list(pool.map(write, range(len(SPLITS))))
    if request.get("durable"):
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
            list(pool.map(sync, out.rglob("*")))
    return {"path": str(out), "numeric": case["numeric"], "categorical": codes}


def make(case: dict[str, Any], files: Sequence[str]) -> tuple[Any, list[str]]:
    """Reads, splits, fits and transforms; returns the frame with features and the names of its codes."""
    import cudf
    import cupy

    frame = cudf.read_parquet(list(files), columns=case["read"])
    for join in case["joins"].values():
        (key,) = join["on"]
        other = cudf.read_parquet(join["path"], columns=[key, *join["columns"]]).set_index(key)
        for column, name in join["columns"].items():
            frame[name] = frame[key].map(other[column])
        del frame[key]
    for name, (one, other) in case["differences"].items():
        frame[name] = frame[one] - frame[other]
    frame["target"] = (frame[case["target"]] > case["above"]).astype("float32")
    times = frame[case["time"]].astype("int64").values
    ordered = cupy.sort(times)
    train_end, valid_end = split_ends(len(frame))
    starts = [int(ordered[train_end]), int(ordered[valid_end])]
    frame["split"] = (times >= starts[0]).astype(np.int8) + (times >= starts[1]).astype(np.int8)
    train = frame["split"] == 0
    for name in case["numeric"]:
        column = frame[name].astype("float32")
        known = column[train]
        column = column.fillna(np.float32(known.quantile(0.5, interpolation="lower")))
        filled = column[train].astype("float64")
        mean, deviation = np.float32(filled.mean()), np.float32(filled.std(ddof=0))
        frame[name] = (column - mean) / deviation
    for name in case["categorical"]:
        counted = frame[name][train].value_counts().reset_index()
        counted.columns = ["value", "count"]
        counted = counted[counted["count"] >= case["min_count"]]
        counted = counted.sort_values(["count", "value"], ascending=[False, True])
        place = cudf.Series(cupy.arange(2, 2 + len(counted), dtype=np.int32), index=counted["value"])
        found = frame[name].map(place).fillna(1).astype("int32")
        frame[name] = found.where(frame[name].notna(), 0)
    moment = frame[case["time"]]
    parts = {"hour": moment.dt.hour + 1, "weekday": moment.dt.weekday + 1}
    made = {f"{case['time']}_{part}": values.astype("int32") for part, values in parts.items()}
    for name, values in made.items():
        frame[name] = values
    return frame, [*case["categorical"], *made]
