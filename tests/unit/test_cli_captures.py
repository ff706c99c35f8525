"""`serin captures`, and what deleting versions and `serin gc` do to records."""

import json
import time
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from serin.cli import app
from serin.errors import NotFound, NotRecorded, NotWatched, SpecError
from serin.formats.captures import METADATA, captures_folder
from serin.formats.schema import write_schema
from serin.monitoring.capture.read import captured
from serin.store.store import Store
from serin.watcher import captures
from tests.kit.decoding import built_decoder
from tests.kit.recorded_parts import write_part
from tests.unit.monitoring.capture.worker import NOON, SCHEMA, Worker, request


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path))
    monkeypatch.delenv("SERIN_STORE", raising=False)
    monkeypatch.setattr(captures, "_BUFFERED_S", 0.0)  # no gateway runs
    built_decoder()
    return tmp_path


def serin(*words: str) -> Result:
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def published(model: str, *versions: int, capture: str = "{share: 1}") -> Store:
    store = Store.open()
    for version in versions:
        folder = Path(store.url) / "models" / model / "versions" / str(version)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"name": model, "version": version}))
        write_schema(folder, SCHEMA)
        (folder / "spec.yaml").write_text(f"monitoring: {{capture: {capture}}}\n")
    return store


def rows(*numbers: int, t: float = NOON) -> pa.Table:
    times = pa.array([round(t * 1e6)] * len(numbers), pa.int64()).cast(METADATA["_t"])
    return pa.table(
        {
            "_id": [f"id-{number}" for number in numbers],
            "_row": pa.array([0] * len(numbers), pa.int32()),
            "_t": times,
            "passenger_id": list(numbers),
            "_answer_p": [[0.25, 0.75]] * len(numbers),
        }
    )


def test_list_shows_what_is_kept_and_what_was_counted(home: Path) -> None:
    assert "no recorded requests" in serin("captures", "list").output
    published("taxis", 1)
    Worker(home, share=0.5).leave([request(1, NOON, rows=3), request(2, NOON)], dropped=7)
    captures.record_all(home, "taxis")
    line = serin("captures", "list").output.splitlines()[1].split()
    assert line[:6] == ["taxis", "1", "1", "2026-03-01T12", "2026-03-01T12", "4"]
    assert line[-3:] == ["50%", "2", "7"]
    (view,) = json.loads(serin("captures", "list", "--json").output)
    assert view["releases"]["taxis-v1"]["dropped"] == 7


READERS = ["captures list", "captures show", "labels show", "quality", "drift"]


@pytest.mark.parametrize("command", READERS)
def test_a_wrong_name_is_told_from_a_model_that_has_no_records_yet(home: Path, command: str) -> None:
    published("taxis", 1).set_alias("taxis", "live", 1)
    with pytest.raises(NotFound, match="no model 'taxi'; did you mean 'taxis'") as error:
        serin(*command.split(), "taxi")
    assert error.value.exit_code == 2
    try:
        told = serin(*command.split(), "taxis").output
    except (NotRecorded, NotWatched) as reason:
        told = str(reason)
    if command != "drift":  # which says first that the spec has no monitoring.drift
        assert "version 1 records every request, but none came yet" in told


@pytest.mark.parametrize(
    ("capture", "live", "told"),
    [
        ("{share: 0}", True, "the spec of version 1 has no monitoring.capture.share"),
        ("{share: 0.015}", True, "version 1 records 1.5% of the requests, but none came yet"),
        ("{share: 1}", False, "no version of it is served"),
    ],
)
def test_the_list_says_why_a_model_has_no_records(capture: str, live: bool, told: str) -> None:
    store = published("taxis", 1, capture=capture)
    if live:
        store.set_alias("taxis", "live", 1)
    assert f"taxis: {told}" in serin("captures", "list").output


def test_the_list_may_be_of_one_model(home: Path) -> None:
    write_part(home, "taxis", 1, rows(1))
    write_part(home, "buses", 1, rows(1, 2))
    head, line = serin("captures", "list", "buses").output.splitlines()
    assert head.split()[-3:] == ["share", "requests", "dropped"]
    assert line.split()[0] == "buses"


def test_show_prints_the_newest_rows_as_csv_or_json(home: Path) -> None:
    write_part(home, "taxis", 1, rows(1, 2, 3))
    write_part(home, "taxis", 2, rows(4))
    table = serin("captures", "show", "taxis", "-n", "2").output.splitlines()
    assert table[0].startswith('"_id","_row"')
    assert [line.split(",")[0] for line in table[1:]] == ['"id-3"', '"id-4"']
    (only,) = json.loads(serin("captures", "show", "taxis:1", "-n", "1", "--json").output)
    assert (only["passenger_id"], only["_answer_p"]) == (3, [0.25, 0.75])
    with pytest.raises(NotFound, match="no recorded version of 'taxis': '9'; known: 1, 2"):
        serin("captures", "show", "taxis:9")


def test_forget_also_deletes_rows_that_are_still_in_a_ring(home: Path) -> None:
    published("taxis", 1)
    Worker(home).leave([request(17, NOON), request(18, NOON)])
    result = serin("captures", "forget", "taxis", "--where", "age = 17000", "--yes")
    assert result.output == "deleted 1 row in 1 file, and 0 labels\n"
    assert captured(home, "taxis")["age"].to_pylist() == [18000]
    with pytest.raises(SpecError, match="no column 'agee'"):
        serin("captures", "forget", "taxis", "--where", "agee = 1", "--yes")


def test_a_masked_column_finds_nobody_and_the_command_says_so(home: Path) -> None:
    published("taxis", 1, capture="{share: 1, mask: [passenger_id]}")
    write_part(home, "taxis", 1, rows(1, 2))
    with pytest.raises(SpecError, match="the values of 'passenger_id' are not recorded"):
        serin("captures", "forget", "taxis", "--where", "passenger_id = 1", "--yes")
    assert captured(home, "taxis").num_rows == 2
    published("taxis", 2)
    write_part(home, "taxis", 2, rows(1, 2))
    result = serin("captures", "forget", "taxis", "--where", "passenger_id = 1 and _row = 0", "--yes")
    assert "some versions do not record the column 'passenger_id'" in result.stderr


def test_without_yes_and_a_terminal_nothing_is_deleted(home: Path) -> None:
    write_part(home, "taxis", 1, rows(1))
    asked = serin("captures", "forget", "taxis", "--where", "true")
    assert asked.exit_code == 2
    assert asked.stderr.startswith(
        "serin: Delete 1 recorded row of taxis and their labels? There is no terminal"
    )
    assert "Usage" not in asked.stderr
    done = json.loads(serin("captures", "forget", "taxis", "--where", "_row > 5", "--yes", "--json").output)
    assert done == {"rows": 0, "files": 0, "labels": 0, "leftovers": 0, "unread": []}
    assert captured(home, "taxis").num_rows == 1


def test_a_deletion_that_was_killed_is_finished_by_the_next_one_which_says_so(home: Path) -> None:
    write_part(home, "taxis", 1, rows(1, 2, 3))
    (old,) = captures_folder(home).rglob("*.parquet")
    kept = old.read_bytes()
    serin("captures", "forget", "taxis", "--where", "passenger_id = 2", "--yes")
    old.write_bytes(
        kept
    )  # as if it had been killed between the new file's name and the removal of the old one
    result = serin("captures", "forget", "taxis", "--where", "passenger_id = 2")
    assert not old.exists()
    assert result.output == (
        "deleted 0 rows in 0 files, and 0 labels\n"
        "removed 1 file with rows of records that a killed process had left\n"
    )
    assert captured(home, "taxis")["passenger_id"].to_pylist() == [1, 3]


def test_deleting_a_version_deletes_its_records(home: Path) -> None:
    published("taxis", 1, 2)
    write_part(home, "taxis", 1, rows(1))
    write_part(home, "taxis", 2, rows(2))
    worker = Worker(home, "taxis-v1")
    worker.leave([request(3, NOON)])
    assert "of recorded requests are deleted" in serin("models", "remove", "taxis:1", "--yes").output
    assert captured(home, "taxis")["passenger_id"].to_pylist() == [2]
    captures.record_all(home, "taxis")
    assert worker.waits == 0
    assert captured(home, "taxis").num_rows == 1, "a version that is gone is not recorded any more"
    serin("models", "remove", "taxis", "--yes")
    assert not captures_folder(home, "taxis").exists()


def test_gc_removes_expired_records_and_those_of_deleted_models_only(home: Path) -> None:
    now = time.time()
    published("taxis", 1, capture="{keep: 2d}")
    for days in (0, 1, 5):
        write_part(home, "taxis", 1, rows(days, t=now - days * 86400))
    write_part(home, "gone", 1, rows(1))
    listed = json.loads(serin("gc", "--json").output)
    assert [(each["kind"], each["name"]) for each in listed] == [("records", "gone"), ("records", "taxis")]
    assert captured(home, "taxis").num_rows == 3
    serin("gc", "--remove")
    assert sorted(captured(home, "taxis")["passenger_id"].to_pylist()) == [0, 1]
    assert not captures_folder(home, "gone").exists()
