"""SQL queries through ADBC: read once for a dataset, in a complete order, without a secret in anything that is kept."""

import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from serin.errors import SourceUnreadable, SpecError
from serin.etl.build import current_key
from serin.etl.raw_rows import read_test_rows
from serin.etl.sources import sql
from serin.etl.sources.find import find_table
from serin.formats.dataset import read_dataset
from serin.pipeline.check import check_spec
from serin.spec.pipeline import PipelineSpec
from serin.spec.tables import SqlTable
from serin.store.store import Store
from tests.fakes.postgres import running_postgres
from tests.unit.etl.trips import build, spec_of, trips

GROUPS = [
    {"columns": ["fare", "people"], "steps": ["fill_median", "normalize"]},
    {"columns": ["taxi", "zone"], "steps": ["categorify"]},
]
ORDERED: dict[str, Any] = {
    "sql": "select * from trips where zone >= 0;", "connection": "env:TRIPS_DB", "order_by": ["trip", "number"],
}  # fmt: skip


def frame() -> pd.DataFrame:
    return trips().assign(
        number=range(900), start=trips()["start"].astype(str), fare=trips()["fare"].astype(float)
    )


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    path = tmp_path / "trips.db"
    with sqlite3.connect(path) as connection:
        frame().sample(frac=1.0, random_state=3).to_sql("trips", connection, index=False)
        connection.commit()
        monkeypatch.setenv("TRIPS_DB", f"sqlite:///{path}")
        yield connection
    connection.close()


def spec_over(folder: Path, **changes: Any) -> PipelineSpec:
    return spec_of(folder, tables={"trips": ORDERED | changes}, features=GROUPS, time=None)


def parquet_digest(folder: Path) -> str:
    spec = spec_of(folder, frame=frame(), features=GROUPS, time=None)
    return str(build(spec, Store(str(folder / "parquet-store"))).digest)


def test_a_query_gives_the_dataset_of_the_same_rows_in_parquet(
    tmp_path: Path, database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spec = Store(str(tmp_path / "store")), spec_over(tmp_path)
    dataset = build(spec, store)
    assert dataset.digest == parquet_digest(tmp_path)
    (file,) = read_dataset(dataset.path).sources
    assert file.snapshot is not None
    assert (file.snapshot.source, file.snapshot.version) == (
        "env:TRIPS_DB",
        sql.query_digest(SqlTable(**ORDERED)),
    )
    assert current_key(spec.data, spec.features, store) is None  # nothing tells without asking
    assert build(spec, store) == dataset
    monkeypatch.setattr(sql, "_GROUP_ROWS", 100)
    assert build(spec, Store(str(tmp_path / "groups")), piece_rows=150).digest == dataset.digest


def test_changed_rows_give_another_dataset_and_test_rows_are_those_that_were_built(
    tmp_path: Path, database: sqlite3.Connection
) -> None:
    store, spec = Store(str(tmp_path / "store")), spec_over(tmp_path)
    dataset = build(spec, store)
    before = read_test_rows(spec.data, spec.features, dataset, max_rows=40).table.to_pandas()
    database.execute("delete from trips where zone = 2")
    database.commit()
    assert read_test_rows(spec.data, spec.features, dataset, max_rows=40).table.to_pandas().equals(before)
    assert build(spec, store).digest != dataset.digest
    (file,) = read_dataset(dataset.path).sources
    Path(file.path).unlink()
    with pytest.raises(SourceUnreadable, match="its rows have changed since the dataset was built"):
        read_test_rows(spec.data, spec.features, dataset, max_rows=40)


def test_a_check_reads_a_few_rows(
    tmp_path: Path, database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "home"))
    assert [column.kind for column in check_spec(spec_over(tmp_path)).inputs] == [
        "float",
        "int",
        "string",
        "int",
    ]
    (few,) = find_table("trips", SqlTable(**ORDERED), rows=tmp_path / "rows", most_rows=10)
    assert pa.parquet.read_metadata(few.path).num_rows == 10


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"order_by": "trip"}, "order_by does not order its rows completely: several have trip = 0"),
        ({"order_by": ["trip", "nmber"]}, "nmber"),
        ({"sql": "select * from strips"}, "no such table: strips"),
        ({"connection": "env:NO_SUCH_DB"}, "the environment variable NO_SUCH_DB is not set here"),
        ({"connection": "file:/no/such/file"}, "/no/such/file holds nothing that can be read"),
    ],
)
def test_a_query_that_cannot_be_read_is_explained(
    tmp_path: Path, database: sqlite3.Connection, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SourceUnreadable) as caught:
        find_table("trips", SqlTable(**ORDERED | changes), rows=tmp_path / "rows")
    assert says in str(caught.value)
    assert not list((tmp_path / "rows").glob("*"))


def test_a_database_that_is_missing_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uri").write_text(f"sqlite:///{tmp_path}/none.db\n")
    table = SqlTable(**ORDERED | {"connection": f"file:{tmp_path}/uri"})
    with pytest.raises(SourceUnreadable, match="names a database file that does not exist"):
        find_table("trips", table, rows=tmp_path / "rows")
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        (
            "nosuchdb://u:s3cr%20et@h/d",
            "the ADBC driver for nosuchdb is missing; pip install adbc-driver-nosuchdb",
        ),
        ("s3cr et", "env:TRIPS_DB holds no URI such as postgresql://"),
        ("postgresql://user:s3cr%20et@127.0.0.1:1/d", "127.0.0.1"),
    ],
)
def test_no_message_shows_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, says: str
) -> None:
    monkeypatch.setenv("TRIPS_DB", uri)
    with pytest.raises(SourceUnreadable) as caught:
        find_table("trips", SqlTable(**ORDERED), rows=tmp_path / "rows")
    assert says in str(caught.value)
    assert "s3cr" not in f"{caught.value} {caught.value.__cause__}"


def test_the_missing_driver_is_named(
    tmp_path: Path, database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "adbc_driver_sqlite.dbapi", None)
    with pytest.raises(SourceUnreadable, match=r"for sqlite is missing; pip install 'serin\[sql\]'"):
        find_table("trips", SqlTable(**ORDERED), rows=tmp_path / "rows")


def test_a_connection_in_the_spec_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        spec_over(tmp_path, connection="postgresql://user:secret@host/db")
    assert "data.tables.trips.connection: must not hold the connection itself" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(SpecError, match=r"data.tables.trips.order_by: is missing"):
        spec_of(tmp_path, tables={"trips": {"sql": "select 1", "connection": "env:X"}})


def test_postgres_gives_the_same_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg

    rows = frame().astype(object).where(frame().notna(), None)
    with running_postgres() as uri:
        with psycopg.connect(uri) as connection, connection.cursor() as cursor:
            cursor.execute(
                "create table trips (trip bigint, taxi text, zone smallint, start timestamp, fare double precision, "
                "people integer, tip numeric, number integer)"
            )
            with cursor.copy("copy trips from stdin") as copy:
                for row in rows.sample(frac=1.0, random_state=3).itertuples(index=False):
                    copy.write_row(row)
        monkeypatch.setenv("TRIPS_DB", uri)
        assert build(spec_over(tmp_path), Store(str(tmp_path / "store"))).digest == parquet_digest(tmp_path)
