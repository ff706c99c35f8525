"""Tables of scheduled scoring for tests: sources in which rows arrive, and targets as their readers find them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.pipeline.score import score_new
from serin.scoring.targets.target import ScoredRun
from serin.store.databases import connected
from serin.store.file_systems import delta_options
from tests.unit.serving import bundles


def arrived(first: int, count: int) -> pa.Table:
    """Rows with the numbers `first`, `first` + 1, ..."""
    columns = {name: values[:, 0].tolist() for name, values in bundles.rows(count, seed=first).items()}
    return pa.table({"row": pa.array(np.arange(first, first + count)), **columns})


class Source(Protocol):
    @property
    def entry(self) -> Any: ...

    def add(self, rows: pa.Table) -> None: ...


class Result(Protocol):
    @property
    def entry(self) -> Any: ...

    def read(self) -> pa.Table: ...


@dataclass(frozen=True)
class Files:
    """A Parquet file for each arrival as a source; a folder of runs as a target."""

    folder: Path

    @property
    def entry(self) -> str:
        return str(self.folder)

    def add(self, rows: pa.Table) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = self.folder / f"{rows['row'][0].as_py():09d}.parquet"
        half = whole.with_suffix(".half")
        pq.write_table(rows, half, row_group_size=max(len(rows) // 3, 1))
        half.rename(whole)

    def read(self) -> pa.Table:
        return pq.read_table(self.folder)


@dataclass(frozen=True)
class Delta:
    url: str

    @property
    def entry(self) -> dict[str, str]:
        return {"delta": self.url}

    def add(self, rows: pa.Table) -> None:
        deltalake.write_deltalake(self.url, rows, mode="append", storage_options=delta_options())

    def read(self) -> pa.Table:
        return deltalake.DeltaTable(self.url, storage_options=delta_options()).to_pyarrow_table()


@dataclass(frozen=True)
class Sql:
    """A table of a database, `scores` as a target."""

    connection: str
    table: str

    @property
    def entry(self) -> dict[str, str]:
        if self.table == "scores":
            return {"table": self.table, "connection": self.connection}
        return {"sql": f"select * from {self.table}", "connection": self.connection, "order_by": "row"}

    def add(self, rows: pa.Table) -> None:
        with connected(self.connection, write=True) as connection, connection.cursor() as cursor:
            cursor.adbc_ingest(self.table, rows, mode="create_append")
            connection.commit()

    def read(self) -> pa.Table:
        return self.ask(f"select * from {self.table}")

    def ask(self, query: str) -> pa.Table:
        with connected(self.connection) as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetch_arrow_table()

    def do(self, statement: str) -> None:
        with connected(self.connection, write=True) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            connection.commit()


@dataclass(frozen=True)
class Scene:
    """Sources and targets in a folder, and in the database that TEST_DATABASE names."""

    folder: Path

    @property
    def files(self) -> Files:
        return Files(self.folder / "rows")

    @property
    def delta(self) -> Delta:
        return Delta(str(self.folder / "delta"))

    @property
    def sql(self) -> Sql:
        return Sql("env:TEST_DATABASE", "payments")

    @property
    def results(self) -> dict[str, Result]:
        return {
            "folder": Files(self.folder / "scored"),
            "delta": Delta(str(self.folder / "scored-delta")),
            "sql": Sql("env:TEST_DATABASE", "scores"),
        }


def score(source: Any, result: Result, **how: Any) -> ScoredRun | None:
    done = score_new(bundles.MODEL, getattr(source, "entry", source), result.entry, workers=2, **how)
    return None if done is None else done.run


def numbers(result: Result) -> list[int]:
    return sorted(result.read().column("row").to_pylist())
