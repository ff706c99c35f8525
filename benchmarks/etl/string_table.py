"""The table that people have, generated: 23 columns, 7 of them categories and 5 of those strings, a lookup by a string
and a derived column; a tenth of the numbers and a hundredth of the categories are null."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.etl.cases import Case, Join

NUMERIC = [f"n{index}" for index in range(12)]
TEXTS = {"s0": 4, "s1": 100, "s2": 2_000, "s3": 50_000, "s4": 200_000}
CODES = {"c0": 20, "c1": 10_000}
PLACES = 30_000
FILE_ROWS = 1_000_000


def write_string_table(folder: Path, rows: int) -> Case:
    """Writes the main table, in files of a million rows, and the table of places."""
    (folder / "main").mkdir(parents=True)
    write_places(folder)
    write_files(folder / "main", rows, _columns)
    return case_of(folder)


def write_files(
    folder: Path, rows: int, make: Callable[[np.random.Generator, int, int], dict[str, pa.Array]]
) -> None:
    """Writes files of a million rows. `make`: the columns of so many rows from a row on."""

    def write(start: int) -> None:
        made = make(np.random.default_rng(start), start, min(FILE_ROWS, rows - start))
        pq.write_table(pa.table(made), folder / f"part-{start:012d}.parquet", row_group_size=FILE_ROWS)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(0, rows, FILE_ROWS)))


def numbers(chance: np.random.Generator, columns: Sequence[str], rows: int) -> dict[str, pa.Array]:
    """Normal numbers; a tenth of every second column is null."""
    made = {}
    for index, name in enumerate(columns):
        values = chance.normal(index, 1 + index, rows).astype(np.float32)
        made[name] = pa.array(values, mask=chance.random(rows) < 0.1 if index % 2 else None)
    return made


def times(chance: np.random.Generator, start: int, rows: int) -> pa.Array:
    """A row a second, up to a quarter of an hour late."""
    seconds = start + np.arange(rows)
    late = chance.integers(0, 10**9, rows)
    return pa.array(1_700_000_000_000_000 + seconds * 1_000_000 + late, pa.timestamp("us"))


def write_places(folder: Path) -> None:
    chance = np.random.default_rng(7)
    places = pa.table(
        {
            "place": names("place", PLACES),
            "height": pa.array(chance.normal(300, 100, PLACES).astype(np.float32)),
            "people": pa.array(chance.exponential(50_000, PLACES).astype(np.float32)),
        }
    )
    pq.write_table(places, folder / "places.parquet")


def case_of(folder: Path) -> Case:
    """The work on the tables in `folder`."""
    columns = {"height": "height", "people": "people"}
    return Case(
        name="strings",
        table=str(folder / "main"),
        joins={"places": Join(path=str(folder / "places.parquet"), on=["place"], columns=columns)},
        differences={"gap": ("n0", "n1")},
        target="y",
        above=0.5,
        time="t",
        numeric=[*NUMERIC, "height", "people", "gap"],
        categorical=[*TEXTS, *CODES],
    )


def names(word: str, count: int) -> pa.Array:
    return pa.array([f"{word}-{number:06d}" for number in range(count)])


def _columns(chance: np.random.Generator, start: int, rows: int) -> dict[str, pa.Array]:
    columns = numbers(chance, NUMERIC, rows)
    for name, size in [*TEXTS.items(), *CODES.items()]:
        codes = pa.array((size * chance.random(rows) ** 2).astype(np.int64), mask=chance.random(rows) < 0.01)
        columns[name] = names(f"{name} of many", size).take(codes) if name in TEXTS else codes
    columns["place"] = names("place", PLACES).take(pa.array(chance.integers(0, PLACES, rows)))
    columns["y"] = pa.array(chance.random(rows).astype(np.float32))
    columns["t"] = times(chance, start, rows)
    columns["note"] = pa.array(chance.integers(0, 2**40, rows))  # not used, as in most tables
    return columns
