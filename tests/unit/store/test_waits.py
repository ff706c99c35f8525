"""What a stage and a run waited for: measured, named, and the longest found again."""

import gc
from pathlib import Path

import pytest

from serin.store.receipt import measure
from serin.store.run_waits import note_waits, run_waits
from serin.store.stage_keys import note, notes
from serin.store.waits import Wait, between, claim, importing, longest, waiting, waiting_in_process


def wait(what: str, seconds: float) -> Wait:
    return Wait(what=what, seconds=seconds)


def test_the_time_of_a_block_counts_also_when_it_fails() -> None:
    waits: list[Wait] = []
    with pytest.raises(OSError, match="disk full"), waiting(waits, "a disk"):
        raise OSError("disk full")
    (found,) = waits
    assert found.what == "a disk"
    assert found.seconds >= 0


def test_a_wait_of_the_process_is_taken_over_once() -> None:
    claim()
    with waiting_in_process("the start of a GPU"):
        pass
    assert [each.what for each in claim()] == ["the start of a GPU"]
    assert claim() == []


def test_no_garbage_is_collected_while_something_is_imported() -> None:
    with importing("imports"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert [each.what for each in claim()] == ["imports"]


def test_waits_with_one_name_count_together_and_short_ones_not_at_all() -> None:
    waits = [wait("Prefect", 0.4), wait("imports", 0.5), wait("Prefect", 0.4), wait("a lock", 0.001)]
    assert longest(waits) == (wait("Prefect", 0.8), wait("imports", 0.5))


def test_moments_give_the_time_since_the_one_before_that_is_known() -> None:
    found = between(("", 10.0), ("taken", None), ("running", 12.0), ("of a clock that is behind", 11.0))
    assert found == [wait("running", 2.0), wait("of a clock that is behind", 0.0)]
    assert between(("", None), ("running", 12.0)) == []


def test_a_run_has_the_longest_waits_around_its_stages_and_in_their_receipts(home: Path) -> None:
    with measure("train") as stage:
        stage.waits = [wait("imports", 2.0)]
    (home / "stages").mkdir(parents=True)
    stage.receipt.write(home / "stages" / "receipt.json")
    note(home, "run", "train", ran=True, why="no earlier result", receipt="stages/receipt.json")
    note(home, "run", "etl", ran=True, why="no earlier result", receipt="stages/lost.json")
    note_waits(home, "run", [wait("start of the process for train", 1.0), wait("news", 0.2)])
    note_waits(home, "run", [wait("start of the process for export", 3.0)])
    assert [str(each) for each in run_waits(home, "run")] == [
        "start of the process for export 3.0 s", "imports 2.0 s", "start of the process for train 1.0 s",
    ]  # fmt: skip
    assert [entry["stage"] for entry in notes(home, "run")] == ["train", "etl"], "waits are no stage"


def test_a_stage_that_was_found_adds_no_waits_of_an_earlier_run(home: Path) -> None:
    with measure("train") as stage:
        stage.waits = [wait("imports", 2.0)]
    (home / "stages").mkdir(parents=True)
    stage.receipt.write(home / "stages" / "receipt.json")
    note(home, "run", "train", ran=False, why="trained before", receipt="stages/receipt.json")
    assert run_waits(home, "run") == ()
    assert run_waits(home, "another") == ()
