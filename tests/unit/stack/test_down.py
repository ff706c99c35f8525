from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from serin.errors import NotUp
from serin.machine.in_memory import socket_folder
from serin.serving.triton.process import new_place
from serin.stack.down import clear_away, take_down
from serin.stack.host.process_scan import STACK_MARK
from serin.stack.host.run_processes import record_folder
from serin.store.artifacts import Release
from tests.logs import heard


def test_nothing_to_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotUp):
        take_down(tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_leftovers_of_a_crash_are_removed_and_reported(tmp_path: Path) -> None:
    orphan = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, STACK_MARK: str(tmp_path)}, start_new_session=True
    )
    sockets = socket_folder(tmp_path)
    (sockets / "supervisor.sock").touch()
    place = new_place(Release(model="flights", version=3), (1, 2, 3))
    record = tmp_path / "releases" / "flights-v3" / "release.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"place": place.to_json()}))
    region = Path("/dev/shm") / f"{place.shared_memory_prefix}region"
    region.touch()
    program = tmp_path / "stack" / "conf.d" / "flights-v3.ini"
    program.parent.mkdir()
    program.touch()

    said: list[str] = []
    with heard(said.append):
        take_down(tmp_path)

    assert orphan.wait(timeout=30) < 0
    assert said == ["the stack had crashed; cleaned up 1 process, 1 shared memory segment, 1 socket"]
    assert not any(path.exists() for path in (sockets, region, program))
    assert clear_away(tmp_path) == ""


def test_a_release_record_that_a_crash_cut_short_does_not_stop_the_cleaning(tmp_path: Path) -> None:
    record = tmp_path / "releases" / "flights-v3" / "release.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"place": {')
    assert clear_away(tmp_path) == ""


def test_the_records_of_runs_are_removed(tmp_path: Path) -> None:
    record = record_folder(tmp_path) / "1"
    record.parent.mkdir(parents=True)
    record.write_text("0d9f1f6e 1")
    clear_away(tmp_path)
    assert not record.parent.exists()
