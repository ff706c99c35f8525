"""Files that are whole or as they were before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serin.machine.durable import Syncs, write_secret, write_whole
from serin.stack.prefect.login import login_file, make_login


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "it"
    write_whole(file, "grün\n")
    assert file.read_text(encoding="utf-8") == "grün\n"
    write_whole(file, b"\xff")
    assert file.read_bytes() == b"\xff"
    assert list(tmp_path.iterdir()) == [file]


def test_a_secret_and_its_name_are_on_the_disk_before_anybody_relies_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, str]] = []  # a folder or not, and what was in the file then
    real = os.fsync

    def fsync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((place.is_dir(), "" if place.is_dir() else place.read_text()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_secret(tmp_path / "it", "secret")
    assert synced == [(False, "secret"), (True, "")]
    assert (tmp_path / "it").stat().st_mode & 0o777 == 0o600
    synced.clear()
    login = make_login(tmp_path)
    assert synced == [(False, f"{login}\n"), (True, "")]
    assert login_file(tmp_path).read_text().strip() == login


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it"
    write_whole(file, "old")

    def full(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_whole(file, "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"it": "old"}


def test_files_are_synced_in_the_background_in_the_order_of_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
    )
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with Syncs() as syncs:
        for name in "ab":
            syncs.add(tmp_path / name / "file", tmp_path / name)
        syncs.wait()
        for name in "ab":
            assert [path for path in synced if name in path.relative_to(tmp_path).parts] == [
                tmp_path / name / "file",
                tmp_path / name,
            ]
        syncs.add(tmp_path / "lost")
        with pytest.raises(FileNotFoundError, match="lost"):
            syncs.wait()
        syncs.add(tmp_path / "lost")
        syncs.drop()
        syncs.wait()
