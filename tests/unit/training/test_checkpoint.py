"""Checkpoints: whole or not counted, verified before use, few of them kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serin.errors import CheckpointBroken, StoreNotWritable
from serin.training.results.checkpoint import Checkpoints, Position


def save(folder: Path, *steps: int, best: dict[int, int] | None = None) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        position = Position(step=step, best_step=(best or {}).get(step))
        checkpoints.save(position, {"model.w": torch.full((3,), float(step))}, lambda: None)
    checkpoints.finish()
    return checkpoints


def kept(folder: Path) -> list[int]:
    return sorted(int(place.name.removeprefix("step-")) for place in (folder / "checkpoints").glob("step-*"))


def test_the_newest_is_read_back_as_it_was(tmp_path: Path) -> None:
    saved = save(tmp_path, 10, 20).newest(print)
    assert saved is not None
    assert saved.position.step == 20
    assert torch.equal(saved.tensors["model.w"], torch.full((3,), 20.0))


def test_there_is_none_in_a_fresh_folder(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).newest(print) is None


def test_the_last_two_and_the_best_they_know_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40, 50, best={20: 20, 30: 20, 40: 20, 50: 50})
    assert kept(tmp_path) == [20, 40, 50]  # going back to 40 still needs 20


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "COMPLETE"])
def test_a_damaged_one_is_passed_over_and_said(tmp_path: Path, file: str) -> None:
    checkpoints = save(tmp_path, 10, 20)
    path = tmp_path / "checkpoints" / "step-00000020" / file
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    said: list[str] = []
    saved = checkpoints.newest(said.append)
    assert saved is not None
    assert saved.position.step == 10
    assert "using the one before" in said[0]


def test_one_without_its_last_file_does_not_count(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 10, 20)
    (tmp_path / "checkpoints" / "step-00000020" / "COMPLETE").unlink()
    saved = checkpoints.newest(pytest.fail)
    assert saved is not None
    assert saved.position.step == 10


def test_a_run_that_went_back_replaces_the_damaged_one(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 10, 20)
    (tmp_path / "checkpoints" / "step-00000020" / "state.json").write_text("{}")
    with pytest.raises(CheckpointBroken, match="does not match its digest"):
        checkpoints.read(20)
    assert save(tmp_path, 20).read(20).position.step == 20


def test_a_failed_write_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(StoreNotWritable, match="Not a directory"):
        save(tmp_path, 10)
