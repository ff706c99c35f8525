"""Delta tables and SQL queries are read as the same rows in Parquet are."""

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import pandas as pd
import pyarrow as pa
import pytest

from serin.draft.guess import draft_table
from serin.errors import SourceMissing, SourceUnreadable, SpecError
from serin.etl.engines.device import Gpus
from serin.etl.identity import current_key
from serin.etl.raw_rows import read_test_rows
from serin.etl.sources import sql
from serin.etl.sources.files import find_files
from serin.etl.sources.find import find_table
from serin.formats.dataset import read_dataset
from serin.pipeline.check import check_spec
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec, read_spec
from serin.spec.pipeline import PipelineSpec
from serin.spec.tables import DeltaTable, SqlTable, as_of
from serin.store.store import Store
from tests.fakes import cupy
from tests.fakes.postgres import running_postgres
from tests.unit.etl.flights import digest
from tests.unit.etl.trips import build, spec_of, trips

GROUPS = [
    {"columns": ["fare", "people"], "steps": ["fill_median", "normalize"]},
    {"columns": ["taxi", "zone"], "steps": ["categorify"]},
]


def rows(first: int, last: int) -> pa.Table:
    return pa.Table.from_pandas(trips().iloc[first:last], preserve_index=False)


def write(folder: Path, *parts: pa.Table, **options: Any) -> str:
    for part in parts:
        deltalake.write_deltalake(folder / "delta", part, mode="append", **options)
    return str(folder / "delta")


def spec_over(folder: Path, **table: Any) -> PipelineSpec:
    return spec_of(folder, tables={"trips": {"delta": str(folder / "delta"), **table}}, features=GROUPS)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def test_a_delta_table_gives_the_dataset_of_the_same_rows_in_parquet(tmp_path: Path, store: Store) -> None:
    write(tmp_path, rows(0, 400), rows(400, 500), rows(500, 900))
    dataset = build(spec_over(tmp_path), store, piece_rows=200)
    parquet = spec_of(tmp_path, features=GROUPS)
    assert dataset.digest == build(parquet, Store(str(tmp_path / "other"))).digest
    sources = read_dataset(dataset.path).sources
    assert [(file.snapshot.kind, file.snapshot.version) for file in sources if file.snapshot] == [
        ("delta", "2")
    ] * 3
    assert build(spec_over(tmp_path), store) == dataset


def test_partition_columns_are_real_columns_of_their_declared_type(tmp_path: Path) -> None:
    frame = trips().assign(code=[f"{zone:02d} a/b" for zone in trips()["zone"]], day=trips()["start"].dt.date)
    table = pa.Table.from_pandas(frame, preserve_index=False)
    write(tmp_path, table, partition_by=["zone", "code"])
    groups = [*GROUPS, {"columns": ["code"], "steps": ["categorify"]}]
    spec = spec_over(tmp_path).model_dump(mode="json", by_alias=True)
    spec = spec_of(tmp_path, tables=spec["data"]["tables"], features=groups)
    dataset = build(spec, Store(str(tmp_path / "store")))
    files = find_table("trips", spec.data.tables["trips"])
    in_order = pd.concat(pd.read_parquet(file.path, partitioning=None, dtype_backend="numpy_nullable").assign(**{
        key: int(value) if key == "zone" else value for key, value in file.partition}) for file in files)  # fmt: skip
    parquet = spec_of(tmp_path, frame=in_order.reset_index(drop=True), features=groups)
    assert dataset.digest == build(parquet, Store(str(tmp_path / "other"))).digest
    assert {kind for file in files for name, kind in file.declared if name in ("zone", "code")} == {
        "int",
        "string",
    }


def test_rows_that_were_removed_are_not_read_and_versions_are(tmp_path: Path, store: Store) -> None:
    path = write(tmp_path, rows(0, 900))
    deltalake.DeltaTable(path).delete("zone = 3")
    kept = (trips()["zone"] != 3).sum()
    assert sum(build(spec_over(tmp_path), store).rows.values()) == kept
    assert sum(build(spec_over(tmp_path, version=0), store).rows.values()) == 900
    with pytest.raises(SourceUnreadable, match=r"it is a Delta table.*write \{delta: PATH\}"):
        find_files("trips", path)


def test_a_table_is_read_as_of_a_time(tmp_path: Path) -> None:
    path = write(tmp_path, rows(0, 500))
    written = datetime.fromtimestamp(deltalake.DeltaTable(path).history(1)[0]["timestamp"] / 1000, UTC)
    write(tmp_path, rows(500, 900))
    spec = spec_over(tmp_path)
    earlier = as_of(spec.data.tables, written)
    assert len(find_table("trips", earlier["trips"])) == 1
    assert len(find_table("trips", as_of(spec.data.tables, datetime.now(UTC))["trips"])) == 2
    assert as_of({"trips": DeltaTable(delta=path, version=1)}, written) == {
        "trips": DeltaTable(delta=path, version=1)
    }
    too_early = DeltaTable(delta=path, as_of=written - timedelta(days=1))
    with pytest.raises(SourceUnreadable, match=r"it has no version as of .*: the oldest in its log is of"):
        find_table("trips", too_early)


def test_a_time_on_the_command_line_sets_the_tables_without_a_version(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    tables = {"trips": {"delta": "delta"}, "rates": {"delta": "rates", "version": 3}}
    content = {
        "name": "trips",
        "data": {"tables": tables, "target": {"expression": "tip > 2", "task": "binary"},
                 "joins": [{"with": "rates", "on": "zone", "columns": ["rate"]}]},
        "features": [{"columns": ["fare"], "steps": ["normalize"]}],
    }  # fmt: skip
    file.write_text(json.dumps(content))
    found = read_spec(file).as_of("2026-01-31").resolved().data.tables
    assert found["trips"] == DeltaTable(
        delta=str(tmp_path / "delta"), as_of=datetime(2026, 1, 31, tzinfo=UTC)
    )
    assert found["rates"] == DeltaTable(delta=str(tmp_path / "rates"), version=3)
    assert read_spec(file).as_of(None).resolved() == load_spec(file)
    with pytest.raises(SpecError, match="'yesterday' is not a valid time"):
        read_spec(file).as_of("yesterday").resolved()
    file.write_text(
        json.dumps(content | {"data": content["data"] | {"tables": {"trips": "t.csv", "rates": "r.csv"}}})
    )
    with pytest.raises(SpecError, match="is for Delta tables"):
        read_spec(file).as_of("2026-01-31").resolved()


def test_columns_that_were_added_later_are_null_in_older_files(tmp_path: Path, store: Store) -> None:
    before = rows(0, 500).drop_columns(["people"])
    write(tmp_path, before, rows(500, 900), schema_mode="merge")
    dataset = build(spec_over(tmp_path), store)
    frame = trips()
    frame.loc[:499, "people"] = None
    parquet = spec_of(tmp_path, frame=frame, features=GROUPS)
    assert dataset.digest == build(parquet, Store(str(tmp_path / "other"))).digest


def test_a_gpu_reads_what_the_host_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of partitions, and of a column that the older files lack."""
    before = rows(0, 500).drop_columns(["people"])
    write(tmp_path, before, rows(500, 900), partition_by=["zone"], schema_mode="merge")
    spec = spec_over(tmp_path)
    expected = digest(spec, EtlSpec(engine="process"), tmp_path / "host")
    monkeypatch.setattr("serin.etl.engines.attempts.usable_gpus", lambda: Gpus(count=1, memory_bytes=2**34))
    monkeypatch.setattr("serin.etl.engines.attempts.memory_pool", nullcontext)
    cupy.install(monkeypatch)
    assert digest(spec, EtlSpec(engine="cuda"), tmp_path / "gpu", 200) == expected


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(SourceUnreadable, match=r"deltalake is missing; pip install 'serin\[delta\]'"):
        find_table("trips", DeltaTable(delta=str(tmp_path)))


def test_versions_with_the_same_rows_have_their_own_lineage(tmp_path: Path, store: Store) -> None:
    path = write(tmp_path, rows(0, 900))
    first = build(spec_over(tmp_path), store)
    deltalake.DeltaTable(path).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    second = build(spec_over(tmp_path, as_of=datetime.now(UTC).isoformat()), store)
    assert second.digest == first.digest
    versions = [read_dataset(dataset.path).sources[0].snapshot for dataset in (first, second)]
    assert [snapshot.version for snapshot in versions if snapshot] == ["0", "1"]


def test_the_test_rows_are_those_of_the_version_that_was_built(tmp_path: Path, store: Store) -> None:
    write(tmp_path, rows(0, 900))
    spec = spec_over(tmp_path)
    dataset = build(spec, store)
    before = read_test_rows(spec.data, spec.features, dataset, max_rows=50)
    deltalake.DeltaTable(tmp_path / "delta").delete("zone <> 2")
    after = read_test_rows(spec.data, spec.features, dataset, max_rows=50)
    assert after.table.to_pandas().equals(before.table.to_pandas())
    assert build(spec, store).digest != dataset.digest


@pytest.mark.parametrize(
    ("configuration", "features", "says"),
    [
        ({"delta.columnMapping.mode": "name"}, [], "column mapping (mode name), which is not supported"),
        ({}, ["somethingNew"], "omethingNew"),
    ],
)
def test_what_only_delta_can_read_is_refused_by_name(
    tmp_path: Path, configuration: dict[str, str], features: list[str], says: str
) -> None:
    path = write(tmp_path, pa.table({"a": [1, 2]}))
    log = tmp_path / "delta" / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["configuration"] |= configuration
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"][0]["metadata"] |= {
                "delta.columnMapping.id": 1,
                "delta.columnMapping.physicalName": "a",
            }
            action["metaData"]["schemaString"] = json.dumps(schema)
        if "protocol" in action:
            names = ["columnMapping", *features]
            action["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": names,
                                  "writerFeatures": names}  # fmt: skip
    log.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(SourceUnreadable) as caught:
        find_table("trips", DeltaTable(delta=path))
    assert says in str(caught.value)


def test_deletion_vectors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, rows(0, 50), configuration={"delta.enableDeletionVectors": "true"})
    assert "deletionVectors" in (deltalake.DeltaTable(path).protocol().reader_features or [])
    assert len(find_table("trips", DeltaTable(delta=path))) == 1  # the feature alone hides no row
    batch = pa.record_batch({"filepath": ["part.parquet"], "selection_vector": [[True, False]]})
    monkeypatch.setattr(deltalake.DeltaTable, "deletion_vectors", lambda _: iter([batch]))
    with pytest.raises(SourceUnreadable, match="it has deletion vectors, which are not supported"):
        find_table("trips", DeltaTable(delta=path))


def test_a_missing_table_or_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match="nothing at"):
        find_table("trips", DeltaTable(delta=str(tmp_path / "none")))
    path = write(tmp_path, rows(0, 50))
    with pytest.raises(SourceUnreadable, match="version"):
        find_table("trips", DeltaTable(delta=path, version=7))
    with pytest.raises(SpecError, match="set `version` or `as_of`, not both"):
        spec_over(tmp_path, version=1, as_of="2026-01-01")


def test_a_drafted_spec_names_the_table(tmp_path: Path) -> None:
    path = write(tmp_path, rows(0, 500))
    text = draft_table(path, "tip > 2", path_in_spec="delta").text
    assert "    main:\n      delta: 'delta'\n" in text


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


def spec_over_query(folder: Path, **changes: Any) -> PipelineSpec:
    return spec_of(folder, tables={"trips": ORDERED | changes}, features=GROUPS, time=None)


def parquet_digest(folder: Path) -> str:
    spec = spec_of(folder, frame=frame(), features=GROUPS, time=None)
    return str(build(spec, Store(str(folder / "parquet-store"))).digest)


def test_a_query_gives_the_dataset_of_the_same_rows_in_parquet(
    tmp_path: Path, database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, spec = Store(str(tmp_path / "store")), spec_over_query(tmp_path)
    dataset = build(spec, store)
    assert dataset.digest == parquet_digest(tmp_path)
    (file,) = read_dataset(dataset.path).sources
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
    store, spec = Store(str(tmp_path / "store")), spec_over_query(tmp_path)
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


def test_a_check_reads_a_few_rows(tmp_path: Path, database: sqlite3.Connection, home: Path) -> None:
    assert [column.kind for column in check_spec(spec_over_query(tmp_path)).inputs] == [
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


def test_a_database_that_is_missing_is_not_made(tmp_path: Path) -> None:
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
        spec_over_query(tmp_path, connection="postgresql://user:secret@host/db")
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
        assert build(spec_over_query(tmp_path), Store(str(tmp_path / "store"))).digest == parquet_digest(
            tmp_path
        )
