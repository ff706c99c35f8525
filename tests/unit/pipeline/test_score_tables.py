"""Scheduled scoring from and into files, Delta tables and databases: each row once, refusals that change nothing."""

import json
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest
from distributed import Client, LocalCluster

from serin.errors import ScoringRefused, SpecError
from serin.pipeline.score import open_target, score_new
from serin.scoring.parts import FolderParts
from serin.store.databases import _without_secrets
from serin.store.store import Store
from tests.fakes.live_quality import publish
from tests.fakes.postgres import running_postgres
from tests.kit.commands import run
from tests.kit.score_tables import Delta, Files, Scene, Source, Sql, arrived, numbers, score
from tests.unit.serving import bundles

ROWS = 90


@pytest.fixture
def scene(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    (tmp_path / "database").touch()
    monkeypatch.setenv("TEST_DATABASE", f"sqlite:///{tmp_path}/database")
    publish(Store.open(), 0.0, "{capture: {share: 0}}")
    return Scene(tmp_path)


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("files", "delta"), ("files", "sql"), ("delta", "delta"), ("delta", "folder"),
        ("sql", "sql"), ("sql", "delta"), ("sql", "folder"),
    ],
)  # fmt: skip
def test_each_run_adds_the_rows_that_have_come(scene: Scene, source: str, result: str) -> None:
    rows: Source = getattr(scene, source)
    out = scene.results[result]
    rows.add(arrived(0, ROWS))
    assert score(rows, out) is not None
    assert score(rows, out) is None
    rows.add(arrived(ROWS, ROWS))
    rows.add(arrived(2 * ROWS, ROWS))
    second = score(rows, out)
    assert second is not None
    assert second.rows == 2 * ROWS
    table = out.read().sort_by("row")
    wanted = [
        bundles.score(publish_path(), bundles.rows(ROWS, seed=first)) for first in range(0, 3 * ROWS, ROWS)
    ]
    np.testing.assert_allclose(table.column("score").to_numpy(), np.concatenate(wanted)[:, 0], atol=1e-6)
    assert numbers(out) == list(range(3 * ROWS))
    assert list(open_target(out.entry).read_runs()) == [1, 2]


@pytest.mark.parametrize("kind", ["delta", "sql"])
def test_dask_workers_score_a_table_into_a_table(scene: Scene, kind: str) -> None:
    """The worker is killed while it scores the first run; Dask starts another one."""

    def die_after_a_part() -> None:
        written = FolderParts.write

        def write(self: FolderParts, number: int, table: pa.Table) -> None:
            written(self, number, table)
            os.kill(os.getpid(), signal.SIGKILL)

        FolderParts.write = write  # type: ignore[method-assign]

    rows: Source = getattr(scene, kind)
    out = scene.results[kind]
    with LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=":0") as cluster:
        for first in (0, ROWS):
            rows.add(arrived(first, ROWS))
            if first == 0:
                with Client(cluster.scheduler_address) as client:
                    before = client.run(os.getpid)
                    client.run(die_after_a_part)
            assert score(rows, out, scheduler=cluster.scheduler_address) is not None
        with Client(cluster.scheduler_address) as client:
            assert client.run(os.getpid) != before
    assert numbers(out) == list(range(2 * ROWS))
    table = out.read().sort_by("row")
    wanted = [bundles.score(publish_path(), bundles.rows(ROWS, seed=first)) for first in (0, ROWS)]
    np.testing.assert_allclose(table.column("score").to_numpy(), np.concatenate(wanted)[:, 0], atol=1e-6)


@pytest.mark.parametrize("result", ["folder", "delta", "sql"])
def test_columns_in_another_order_keep_their_values(scene: Scene, result: str) -> None:
    rows, out = scene.files, scene.results[result]
    other = {"temp": "distance", "distance": "temp"}
    for first in (0, ROWS, 2 * ROWS):
        table = arrived(first, ROWS)
        rows.add(table.select([other.get(name, name) for name in table.column_names]) if first else table)
        if first:
            score(rows, out)
    found = out.read().sort_by("row")
    wanted = pa.concat_tables([arrived(first, ROWS) for first in (0, ROWS, 2 * ROWS)])
    for name in ("temp", "distance", "carrier"):
        np.testing.assert_array_equal(
            found.column(name).to_pandas().to_numpy(), wanted.column(name).to_pandas().to_numpy()
        )


def publish_path() -> str:
    return Store.open().bundle(bundles.MODEL, 1).path


def test_rows_are_there_once_whatever_moment_the_process_is_killed_at(tmp_path: Path) -> None:
    """A few of the kills of `make chaos`."""
    given = ("--targets", "parquet", "delta", "sqlite", "--kills", "4", "--rows", "120", "--seed", "7")
    said = run(sys.executable, "-m", "tests.chaos.scores", *given, env=dict(os.environ)).stdout
    played = [json.loads(line) for line in said.splitlines()]
    assert [each["target"] for each in played] == ["parquet", "delta", "sqlite"]
    for each in played:
        print(each)
        assert each["killed"] > 0
        assert each["in_commit"] > 0 or each["target"] == "parquet"
        assert (each["rows"], each["lost"], each["doubled"]) == (600, 0, 0)


def test_a_compaction_scores_nothing_twice_and_replaced_rows_are_named(scene: Scene) -> None:
    rows, out = scene.delta, scene.results["folder"]
    rows.add(arrived(0, ROWS))
    score(rows, out)
    rows.add(arrived(ROWS, ROWS))
    deltalake.DeltaTable(rows.url).optimize.compact()
    done = score(rows, out)
    assert done is not None
    assert (done.rows, done.upto) == (ROWS, 2)
    assert numbers(out) == list(range(2 * ROWS))
    deltalake.DeltaTable(rows.url).delete("row = 3")
    with pytest.raises(ScoringRefused, match=r"version 3 \(DELETE\) replaces rows.*--since 4 leaves it out"):
        score(rows, out)
    rows.add(arrived(2 * ROWS, ROWS))
    assert score(rows, out, since="4") is not None
    assert numbers(out) == list(range(3 * ROWS))


def test_a_column_that_a_delta_table_got_later_is_named(scene: Scene) -> None:
    rows, out = scene.delta, scene.results["delta"]
    rows.add(arrived(0, ROWS))
    score(rows, out)
    wider = arrived(ROWS, ROWS).append_column("more", pa.array(range(ROWS)))
    deltalake.write_deltalake(rows.url, wider, mode="append", schema_mode="merge")
    with pytest.raises(ScoringRefused, match="more is int64, before missing"):
        score(rows, out)
    assert numbers(out) == list(range(ROWS))


def test_partitions_of_a_delta_table_are_columns(scene: Scene) -> None:
    rows, out = scene.delta, scene.results["sql"]
    deltalake.write_deltalake(rows.url, arrived(0, ROWS), partition_by=["carrier"])
    score(rows, out)
    table = out.read().sort_by("row")
    wanted = bundles.score(publish_path(), bundles.rows(ROWS, seed=0))[:, 0]
    np.testing.assert_allclose(table.column("score").to_numpy(), wanted, atol=1e-6)


def test_rows_that_are_equal_in_the_first_column_are_not_lost(scene: Scene) -> None:
    rows, out = scene.sql, scene.results["sql"]
    entry = {**rows.entry, "order_by": ["hour", "row"]}
    rows.add(arrived(0, ROWS).append_column("hour", pa.array([f"0{n // 30}:00" for n in range(ROWS)])))
    done = score(entry, out)
    assert done is not None
    assert (done.upto, done.seen, done.rows) == ("02:00", ROWS, ROWS)
    rows.add(arrived(ROWS, 2).append_column("hour", pa.array(["02:00", "03:00"])))
    with pytest.raises(ScoringRefused, match="1 rows came late: their hour is at most '02:00'"):
        score(entry, out)
    with pytest.raises(ScoringRefused, match="--late is for files"):
        score(entry, out, late=True)
    assert len(numbers(out)) == ROWS
    assert score(entry, out, since="03:00") is not None
    assert score(entry, out, since="03:00") is None
    assert numbers(out) == [*range(ROWS), ROWS + 1]


@pytest.mark.parametrize("since", [None, "-5", "3"])
def test_another_since_hides_no_late_rows(scene: Scene, since: str | None) -> None:
    rows, out = scene.sql, scene.results["sql"]
    for first in (0, 10):
        rows.add(arrived(first, 1))
    score(rows, out, since="0")
    for first in (5, 20):
        rows.add(arrived(first, 1))
    with pytest.raises(
        ScoringRefused, match=r"1 rows came late: their row is at most 10.*--since above that"
    ):
        score(rows, out, since=since)
    assert numbers(out) == [0, 10]
    assert score(rows, out, since="11") is not None
    assert score(rows, out, since=since) is None
    assert numbers(out) == [0, 10, 20]


def test_a_since_that_is_not_a_number_is_refused_where_one_is_needed(scene: Scene) -> None:
    rows, out = scene.sql, scene.results["sql"]
    rows.add(arrived(0, ROWS))
    with pytest.raises(ScoringRefused, match="--since ²: row is an integer"):
        score(rows, out, since="²")
    scene.delta.add(arrived(0, ROWS))
    with pytest.raises(ScoringRefused, match="--since ²: of a Delta table it is the first version"):
        score(scene.delta, out, since="²")


def test_partitions_by_time_of_a_delta_table_are_columns_of_every_run(scene: Scene) -> None:
    rows, out = scene.delta, scene.results["delta"]
    hours = [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in (0, 5)]
    for first, hour in zip((0, ROWS), hours, strict=True):
        at = pa.array([hour] * ROWS, pa.timestamp("us", "UTC"))
        table = (
            arrived(first, ROWS).append_column("at", at).append_column("local", at.cast(pa.timestamp("us")))
        )
        deltalake.write_deltalake(rows.url, table, mode="append", partition_by=["at", "local"])
        assert score(rows, out) is not None
    found = out.read().sort_by("row")
    assert found.column("at").to_pylist() == [hours[0]] * ROWS + [hours[1]] * ROWS
    assert found.column("local").to_pylist() == [
        each.replace(tzinfo=None) for each in found.column("at").to_pylist()
    ]


def test_rows_without_a_value_in_the_first_column_are_named(scene: Scene) -> None:
    rows, out = scene.sql, scene.results["sql"]
    rows.add(arrived(0, ROWS))
    rows.do("update payments set row = null where row < 2")
    with pytest.raises(ScoringRefused, match="2 rows have no row, so nothing tells whether they were scored"):
        score(rows, out)
    with pytest.raises(ScoringRefused, match="temp is float; the first order_by column must be an integer"):
        score({**rows.entry, "sql": "select * from payments where temp is not null", "order_by": "temp"}, out)


def test_folders_and_options_of_csv_files_are_those_of_data_tables(scene: Scene) -> None:
    out = scene.results["folder"]
    for day in (1, 2):
        folder = scene.folder / "csv" / f"carrier=AA/day={day}"
        folder.mkdir(parents=True)
        table = arrived(day * ROWS, ROWS).drop_columns(["carrier"])
        nights = [None if night < 0 else bool(night) for night in table.column("night").to_pylist()]
        table = table.set_column(table.column_names.index("night"), "night", pa.array(nights))
        pacsv.write_csv(table, folder / "rows.txt", pacsv.WriteOptions(delimiter=";"))
    entry = f"{{path: {scene.folder}/csv/*/*/*.txt, delimiter: ';'}}"
    done = score(entry, out, since="carrier=AA/day=2")
    assert done is not None
    table = out.read()
    assert set(table.column("day").to_pylist()) == {2}
    columns = bundles.rows(ROWS, seed=2 * ROWS) | {"carrier": np.full((ROWS, 1), "AA", dtype=object)}
    wanted = bundles.score(publish_path(), columns)[:, 0]
    np.testing.assert_allclose(table.column("score").to_numpy(), wanted, atol=1e-6)


@pytest.mark.usefixtures("scene")
def test_delta_tables_at_s3_are_sources_and_targets(bucket: str) -> None:
    """In another process: deltalake holds the interpreter's lock while it reads a log, and the server needs it."""
    rows, out = Delta(f"{bucket}/rows"), Delta(f"{bucket}/scores")
    rows.add(arrived(0, ROWS))
    score(rows, out)
    rows.add(arrived(ROWS, ROWS))
    command = (sys.executable, "-m", "serin.cli", "score", bundles.MODEL)
    said = run(*command, f"{{delta: {rows.url}}}", "--out", f"{{delta: {out.url}}}").stdout
    assert f"{ROWS} rows scored by delays-v1" in said
    assert numbers(out) == list(range(2 * ROWS))


@pytest.mark.usefixtures("scene")
def test_postgres_compares_times_and_numbers_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Sql("env:TEST_DATABASE", "scores")
    with running_postgres() as uri:
        monkeypatch.setenv("TEST_DATABASE", uri)
        rows = Sql("env:TEST_DATABASE", "payments")
        rows.add(arrived(0, ROWS))
        rows.do("create view timed as select *, timestamptz '2026-01-31 12:00:00.5+00' + row * interval '1 s' as at, "
                "row::numeric / 10 as tenth from payments")  # fmt: skip
        for column, upto in (("at", "2026-01-31 12:01:29.500000+00:00"), ("tenth", "8.9")):
            entry = {"sql": "select * from timed", "connection": out.connection, "order_by": [column, "row"]}
            result = Sql(out.connection, "scores")
            done = score(entry, result)
            assert done is not None
            assert str(done.upto).startswith(upto)
            assert score(entry, result) is None
            rows.add(arrived(ROWS, 1))
            assert score(entry, result) is not None
            assert numbers(result) == list(range(ROWS + 1))
            rows.do(f"delete from payments where row = {ROWS}")
            rows.do("drop table scores")
            rows.do("drop table serin_scored_runs")


@pytest.mark.parametrize(
    ("rows", "out", "words"),
    [
        ("{delta: a, version: 3}", "out", "version: leave it out"),
        ("rows", "{table: scores, connection: 'sqlite:///s3cret'}", "must not hold the connection itself"),
        (
            "rows",
            "{table: scores, connection: postgresql://u:s3cret@h}",
            "must not hold the connection itself",
        ),
        ("https://bob:s3cret@host/t", "out", "the URL holds a password"),
        ("rows", "{delta: 's3://KEY:s3cret@bucket/t'}", "the URL holds a password"),
        ("rows", "{tabel: scores}", "tabel: Extra inputs are not permitted"),
        ("rows", "{delta: a: s3cret: {}", "is not a mapping in YAML"),
        ("{sql: select 1, connection: env:X}", "out", "order_by"),
    ],
)
def test_an_entry_that_is_wrong_is_explained_without_its_secrets(rows: str, out: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        score_new("delays", rows, out)
    assert "s3cret" not in str(caught.value)


def test_no_message_and_no_watermark_holds_the_connection(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.files.add(arrived(0, ROWS))
    monkeypatch.setenv("TEST_DATABASE", "postgresql://user:s3cr%20et@127.0.0.1:1/d")
    with pytest.raises(ScoringRefused, match="it cannot be read") as caught:
        score(scene.files, scene.results["sql"])
    assert "s3cr" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("secret", ["s3cr%20et", "s3cr+et", "s3cr et"])
def test_a_password_among_the_options_of_a_uri_is_removed_from_messages(secret: str) -> None:
    uri = f"postgresql://host/payments?user=ann&password={secret.replace(' ', '%20')}&sslmode=require"
    for text in (uri, f"password {secret} is wrong", "s3cr et"):
        assert "s3cr" not in _without_secrets(f"cannot connect: {text}", uri)


def test_another_query_or_the_targets_own_rows_are_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, out = scene.sql, scene.results["sql"]
    rows.add(arrived(0, ROWS))
    done = score(rows, out)
    assert done is not None
    assert "sqlite:///" not in done.dump().decode()
    (scene.folder / "other").touch()
    monkeypatch.setenv("OTHER_DATABASE", f"sqlite:///{scene.folder}/other")
    other = Sql("env:OTHER_DATABASE", "payments")
    other.add(arrived(ROWS, ROWS))
    with pytest.raises(ScoringRefused, match="the scores of another table or query"):
        score(other, out)
    with pytest.raises(ScoringRefused, match="the scores of another table or query"):
        score({**rows.entry, "sql": "select * from payments where row > 3"}, out)
    inside = Files(scene.folder / "rows" / "scored")
    scene.files.add(arrived(0, ROWS))
    score(scene.files, inside)
    with pytest.raises(ScoringRefused, match="its own files are among the rows"):
        score(scene.files, inside)
