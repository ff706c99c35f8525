"""The prepared database of Prefect: when it fits an empty state, and when the server must look itself."""

import contextlib
import importlib.util
import sqlite3
from pathlib import Path

import pytest

from serin.prefect import prepared
from serin.prefect.command import IMPORTED
from serin.prefect.prepared import copy_template, database, is_prepared, note_prepared, template_file
from serin.prefect.processes import prefect_server

SKIPS = (
    "PREFECT_SERVER_DATABASE_MIGRATE_ON_START",
    "PREFECT_API_BLOCKS_REGISTER_ON_START",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION",
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _database(file: Path, revision: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(file)) as made, made:
        made.execute("CREATE TABLE alembic_version (version_num TEXT)")
        made.execute("INSERT INTO alembic_version VALUES (?)", (revision,))
    return file


def test_an_empty_state_gets_the_template_with_its_deployments_else_the_one_without(tmp_path: Path) -> None:
    assert copy_template(tmp_path / "a", "digest") is None
    _database(template_file(), "1")
    assert copy_template(tmp_path / "a", "digest") == "empty"
    _database(template_file("digest"), "2")
    assert copy_template(tmp_path / "b", "digest") == "whole"
    assert copy_template(tmp_path / "c", "another") == "empty"
    assert [prepared.revision(database(tmp_path / name)) for name in "abc"] == ["1", "2", "1"]
    assert database(tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert copy_template(tmp_path / "a", "digest") is None  # a state keeps its database


def test_a_template_that_is_damaged_or_of_another_installation_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = _database(template_file(), "1")
    with monkeypatch.context() as other:
        other.setattr(prepared.platform, "python_version", lambda: "3.99.0")
        assert copy_template(tmp_path / "a", "digest") is None
    template.write_bytes(b"half")
    assert copy_template(tmp_path / "a", "digest") is None
    assert not database(tmp_path / "a").exists()


def test_a_server_looks_itself_unless_this_installation_has_prepared_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_prepared(tmp_path)
    file = _database(database(tmp_path), "1")
    assert not is_prepared(tmp_path)
    note_prepared(tmp_path)
    assert is_prepared(tmp_path)
    skipping = prefect_server(tmp_path, 4200).environment
    assert {skipping[name] for name in SKIPS} == {"false"}
    file.unlink()
    _database(file, "0")  # restored from an older backup
    assert not is_prepared(tmp_path)
    assert not set(SKIPS) & set(prefect_server(tmp_path, 4200).environment)
    note_prepared(tmp_path)
    monkeypatch.setattr(prepared.metadata, "version", lambda _: "99")
    assert not is_prepared(tmp_path)


def test_prefect_knows_the_settings_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings.models.root import Settings

    for name in SKIPS:
        monkeypatch.setenv(name, "false")
    server = Settings().server
    assert not server.database.migrate_on_start
    assert not server.register_blocks_on_start
    assert not server.memoize_block_auto_registration


def test_only_the_newest_templates_are_kept(tmp_path: Path) -> None:
    import os

    for number in range(9):
        os.utime(_database(template_file(f"{number}"), "1"), (number, number))
    prepared.keep_newest()
    assert len(list(prepared.template_folder().iterdir())) == prepared._KEPT
    assert template_file("8").exists()
    assert not template_file("0").exists()


@pytest.mark.parametrize("module", IMPORTED)
def test_what_is_imported_before_prefect_s_command_exists(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
