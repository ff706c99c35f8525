"""Decisions of one machine: on its disk before they count, or in memory where they must not wait for the disk."""

import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serin.errors import FileBroken, JournalUnknown
from serin.formats.serving.journal import Decision
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.record import rollout2decision
from serin.store.artifacts import Release
from tests.fakes.full_disk import full_disk
from tests.fakes.rollout import home_journals
from tests.signals import hit

ROLLOUT = Rollout(
    id="r1", candidate=Release(model="flights", version=2), stable=None, previous=None, plan=Plan(),
    phase=Phase.SHIFTING, step=0, began=0.0, since=0.0, evidence_from=0.0,
)  # fmt: skip


def decision(**changes: Any) -> Decision:
    return replace(rollout2decision(ROLLOUT, 1.0), **changes)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a folder in memory, as a stack that was started has."""
    home, memory = tmp_path / "home", tmp_path / "memory"
    (home / "stack").mkdir(parents=True)
    memory.mkdir()
    (home / "stack" / "sockets").symlink_to(memory)
    return home


def reasons(home: Path) -> list[str]:
    return [found.reason for found in home_rollouts(home).decisions("flights")]


def test_a_failed_append_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = home_journals(home).open("flights")
    journal.append(decision(reason="one"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                journal.append(decision(reason="lost"))
        assert reasons(home) == [each.reason for each in journal.all()] == ["one"]
    assert journal.append(decision(reason="two")).seq == 2
    assert reasons(home) == ["one", "two"]


def test_an_append_whose_last_step_fails_leaves_nothing_behind(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = home_journals(home).open("flights")
    real, calls = os.fsync, 0

    def fails_at_the_folder(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fails_at_the_folder)
    with pytest.raises(OSError, match="Input/output"):
        journal.append(decision(reason="lost"))
    assert reasons(home) == []
    assert journal.append(decision(reason="one")).seq == 1


def test_an_urgent_decision_counts_before_the_disk_takes_it(home: Path) -> None:
    journal = home_journals(home).open("flights")
    journal.append(decision(reason="one"))
    with full_disk(home):
        journal.append(decision(reason="back"), urgent=True)
        with pytest.raises(OSError, match=r"No space.*decisions"):
            journal.append(decision(reason="forward"))
        journal.append(decision(reason="and ended"), urgent=True)
        assert (journal.waiting, [each.seq for each in journal.all()]) == (2, [1, 2, 3])
        after_a_kill = home_journals(home).open("flights")
        assert after_a_kill.waiting == 2
        with pytest.raises(OSError, match="No space"):
            after_a_kill.flush()
        assert reasons(home) == ["one", "back", "and ended"], "a reader sees them"
        assert home_rollouts(home).last("flights").reason == "and ended"
    assert after_a_kill.append(decision(reason="next")).seq == 4
    (home / "stack" / "sockets").unlink()
    assert reasons(home) == ["one", "back", "and ended", "next"], "all of them are on the disk"


def test_without_a_folder_in_memory_the_process_alone_knows_an_urgent_decision(home: Path) -> None:
    (home / "stack" / "sockets").unlink()
    journal = home_journals(home).open("flights")
    with full_disk(home):
        journal.append(decision(reason="back"), urgent=True)
        assert (journal.waiting, reasons(home)) == (1, [])
    journal.flush()
    assert (journal.waiting, reasons(home)) == (0, ["back"])


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format":"serin.decision","version":9}', b"\x00" * 90])
def test_what_is_not_a_decision_is_named_and_left_alone(home: Path, content: bytes) -> None:
    home_journals(home).open("flights").append(decision())
    (newest,) = (home / "rollouts" / "flights" / "decisions").iterdir()
    newest.write_bytes(content)
    for read in (home_rollouts(home).decisions, home_rollouts(home).last, home_journals(home).open):
        with pytest.raises(JournalUnknown, match=f"{newest} is not a decision"):
            read("flights")
    assert newest.read_bytes() == content


def test_a_decision_about_another_model_is_named(home: Path) -> None:
    of_taxis = replace(ROLLOUT, candidate=Release(model="taxis", version=1))
    home_journals(home).open("flights").append(rollout2decision(of_taxis, 1.0))
    for read in (home_rollouts(home).last, home_journals(home).open):
        with pytest.raises(FileBroken, match=r"decisions/0+1\.json.*it is about taxis.*restore it"):
            read("flights")


def test_a_writer_killed_at_any_moment_loses_no_decision_that_was_confirmed(home: Path) -> None:
    """SIGKILL, thirty times over one journal, while it is appended to and compacted all the time."""
    draw, acknowledged, compacted = random.Random(1), 0, set[int]()
    for _ in range(30):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            write_until_killed(home, tell)
        os.close(tell)
        with os.fdopen(told, "rb") as stream:
            first = stream.readline()  # it is at work
            time.sleep(draw.random() * 0.02)
            hit(child)
            os.waitpid(child, 0)
            rest = stream.read().split(b"\n")
        acknowledged = max(acknowledged, int(first), *(int(line) for line in rest[:-1]))
        found = home_rollouts(home).decisions("flights")
        assert [d.seq for d in found] == sorted({d.seq for d in found})
        assert found[-1].seq >= acknowledged
        assert found[-1].reason == f"number {found[-1].seq}"
        compacted.add(found[0].seq)
    assert len(compacted) > 5, "it was compacted between most kills"


def write_until_killed(home: Path, tell: int) -> None:
    """In a child process: never returns."""
    try:
        journal = home_journals(home, compact_at=4, young_s=0.0).open("flights")
        known = journal.all()
        number = known[-1].seq if known else 0
        while True:
            number += 1
            journal.append(decision(reason=f"number {number}"))
            os.write(tell, b"%d\n" % number)
            journal.compact(lambda known: {found.seq for found in known[-2:]})
    finally:
        os._exit(1)
