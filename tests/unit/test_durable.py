"""Files that are whole or as they were before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serin.durable import write_whole


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "it"
    write_whole(file, "grün\n")
    assert file.read_text(encoding="utf-8") == "grün\n"
    write_whole(file, b"\xff")
    assert file.read_bytes() == b"\xff"
    assert list(tmp_path.iterdir()) == [file]


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
