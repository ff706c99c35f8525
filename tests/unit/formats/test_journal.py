import contextlib
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serin.errors import FileBroken, JournalHeld, JournalUnknown
from serin.formats.serving.journal import (
    Decision,
    Journal,
    JournalReader,
    last_decision,
    read_decisions,
    torn_bytes,
    torn_file,
)
from tests.fakes.full_disk import full_disk
from tests.signals import hit


def decision(**changes: Any) -> Decision:
    plain = Decision(
        t=1.0, rollout="r1", phase="shifting", step=0, weight=5.0, verdict="pass", reason="all well", by="controller"
    )  # fmt: skip
    return replace(plain, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_decisions_come_back_in_order_and_numbered(tmp_path: Path) -> None:
    path = tmp_path / "flights" / "journal.jsonl"
    with Journal(path) as journal:
        for weight in (5.0, 25.0):
            journal.append(decision(weight=weight, evidence={"candidate": [3, 0]}))
    with Journal(path) as journal:
        journal.append(decision(weight=50.0))
    assert [(d.seq, d.weight) for d in read_decisions(path)] == [(1, 5.0), (2, 25.0), (3, 50.0)]
    assert read_decisions(path)[0].evidence == {"candidate": [3, 0]}


def test_a_reader_that_follows_one_rollout_sees_what_is_whole_and_reads_nothing_twice(path: Path) -> None:
    follow = JournalReader(path, "r1")
    assert follow.decisions() == []
    with Journal(path) as journal:
        for rollout in ("r0", "r1", "r1"):
            journal.append(decision(rollout=rollout))
        assert [d.seq for d in follow.decisions()] == [2, 3]
        journal.append(decision(reason='of the rollout "rollout":"r1", it says', rollout="r2"))
        whole = path.stat().st_size
        journal.append(decision())
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    assert [d.seq for d in follow.decisions()] == [2, 3], "its last line is torn"
    path.write_bytes(bytes(whole) + data[whole:])
    assert [d.seq for d in follow.decisions()] == [2, 3, 5], "what it has read may be gone"
    path.write_bytes(data[:whole])
    assert [d.seq for d in follow.decisions()] == [2, 3], "a line was taken back"


def test_the_first_line_names_format_and_version(path: Path) -> None:
    Journal(path).close()
    assert path.read_text() == '{"format": "serin.journal", "version": 2}\n'


def test_every_torn_end_is_repaired_on_open(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(decision(weight=5.0))
        whole = path.stat().st_size
        journal.append(decision(weight=25.0))
    data = path.read_bytes()
    for size in range(whole, len(data)):
        path.write_bytes(data[:size])
        assert [d.weight for d in read_decisions(path)] == [5.0], "a reader does not see the torn line"
        with Journal(path) as journal:
            assert journal.append(decision(weight=30.0)).seq == 2
        assert [d.weight for d in read_decisions(path)] == [5.0, 30.0]


def test_an_end_of_zeros_left_by_a_power_cut_is_repaired(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(decision(weight=5.0))
    with path.open("ab") as file:
        file.write(bytes(500) + b"\n")
    with Journal(path) as journal:
        journal.append(decision(weight=25.0))
    assert [d.weight for d in read_decisions(path)] == [5.0, 25.0]


def test_a_torn_header_is_written_again(path: Path) -> None:
    path.write_text('{"format": "ser')
    with Journal(path) as journal:
        journal.append(decision())
    assert len(read_decisions(path)) == 1


def test_a_damaged_line_in_the_middle_hides_no_other(path: Path) -> None:
    with Journal(path) as journal:
        for weight in (1.0, 2.0, 3.0):
            journal.append(decision(weight=weight))
    path.write_bytes(path.read_bytes().replace(b'"weight":2.0', b'"weight":\x00\x00\x00'))
    assert [d.weight for d in read_decisions(path)] == [1.0, 3.0]
    with Journal(path) as journal:
        assert journal.append(decision()).seq == 4


def test_a_second_writer_is_refused_until_the_first_is_gone(path: Path) -> None:
    first = Journal(path)
    with pytest.raises(JournalHeld, match="another rollout controller"):
        Journal(path)
    first.close()
    Journal(path).close()


@pytest.mark.parametrize("version", [1, 99])
def test_a_file_of_another_version_is_refused_and_left_alone(path: Path, version: int) -> None:
    path.write_text(f'{{"format": "serin.journal", "version": {version}}}\n{{"new": 1}}\n')
    with pytest.raises(JournalUnknown, match=f'"version": {version}'):
        Journal(path)
    with pytest.raises(JournalUnknown, match="move the file away"):
        read_decisions(path)
    assert path.read_text().endswith('{"new": 1}\n')


def test_a_failed_append_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(path) as journal:
        journal.append(decision(weight=5.0))

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                journal.append(decision(weight=25.0))
        assert journal.append(decision(weight=30.0)).seq == 2
    assert [d.weight for d in read_decisions(path)] == [5.0, 30.0]


def test_an_urgent_decision_counts_before_the_disk_takes_it(tmp_path: Path) -> None:
    home, spare = tmp_path / "home", tmp_path / "memory" / "flights.jsonl"
    path = home / "journal.jsonl"
    with Journal(path, spare=spare) as journal:
        journal.append(decision(weight=5.0))
        with full_disk(home):
            journal.append(decision(weight=0.0), urgent=True)
            with pytest.raises(OSError, match=r"No space.*journal\.jsonl"):
                journal.append(decision(weight=25.0))
            assert (journal.waiting, [d.weight for d in journal.all()]) == (1, [5.0, 0.0])
    with Journal(path, spare=spare) as journal, full_disk(home):
        assert journal.waiting == 1, "after a kill"
        with pytest.raises(OSError, match="No space"):
            journal.flush()
    assert [d.seq for d in JournalReader(path, "r1", spare).decisions()] == [1, 2]
    assert last_decision(path, spare) == read_decisions(path, spare)[-1]
    with Journal(path, spare=spare) as journal:
        assert journal.append(decision(weight=50.0)).seq == 3
    assert (spare.exists(), [d.weight for d in read_decisions(path)]) == (False, [5.0, 0.0, 50.0])


def test_a_torn_end_is_noticed_and_kept(path: Path) -> None:
    with Journal(path) as journal:
        journal.append(decision(weight=5.0))
        journal.append(decision(weight=25.0))
        assert torn_bytes(path) == 0
    data = path.read_bytes()
    path.write_bytes(data[:-40])
    torn = data[:-40].rpartition(b"\n")[2]
    assert torn_bytes(path) == len(torn)
    Journal(path).close()
    assert (torn_file(path).read_bytes(), torn_bytes(path)) == (torn, len(torn)), "until a person removes it"


@pytest.mark.parametrize("damage", ["half", "missing", "replaced"])
def test_a_journal_that_is_damaged_while_it_is_open_loses_no_later_decision(path: Path, damage: str) -> None:
    with Journal(path) as journal:
        journal.append(decision(weight=5.0))
        journal.append(decision(weight=25.0))
        if damage == "half":
            os.truncate(path, path.stat().st_size - 100)
        else:
            path.unlink()
        if damage == "replaced":
            path.write_text("a restored file")
            with pytest.raises(FileBroken, match=r"journal\.jsonl.*restart the controller"):
                journal.append(decision(weight=50.0))
            assert path.read_text() == "a restored file"
            return
        journal.append(decision(weight=50.0))
    kept = [5.0, 50.0] if damage == "half" else [5.0, 25.0, 50.0]
    assert [d.weight for d in read_decisions(path)] == kept


def test_the_last_decision_is_found_however_long_the_lines_are(tmp_path: Path, path: Path) -> None:
    with Journal(path) as journal:
        assert journal.last() is None
        for size in (10, 100_000, 200_000):
            journal.append(decision(weight=float(size), reason="x" * size))
            assert last_decision(path) == journal.all()[-1]
    assert last_decision(tmp_path / "none.jsonl") is None


def newest_two(decisions: Sequence[Decision]) -> set[int]:
    return {found.seq for found in decisions[-2:]}


def test_a_compacted_journal_has_the_kept_lines_byte_for_byte_and_continues(path: Path) -> None:
    follow = JournalReader(path, "r1")
    with Journal(path, compact_bytes=1000) as journal:
        for weight in range(4):
            journal.append(decision(weight=float(weight)))
        assert [d.seq for d in follow.decisions()] == [1, 2, 3, 4]
        assert not journal.compact(newest_two), "it is not large"
        for _ in range(10):
            before = path.read_bytes().splitlines()
            if journal.append(decision()) and journal.compact(newest_two):
                break
        assert path.read_bytes().splitlines()[1] == before[-1]
        assert len(read_decisions(path)) == 2
        number = journal.append(decision(weight=9.0)).seq
    found = read_decisions(path)
    assert (found[-1].seq, found[-1].weight, len(found)) == (number, 9.0, 3)
    assert last_decision(path) == found[-1]
    assert follow.decisions() == found, "a reader that was inside it begins again"
    with pytest.raises(JournalHeld), Journal(path):
        Journal(path)
    with Journal(path) as journal:
        assert journal.append(decision()).seq == number + 1


class Crash(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "replace", "close"])
def test_a_crash_inside_a_compaction_leaves_the_old_journal_or_the_new_one(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: bool
) -> None:
    for at in range(1, 4):
        path.unlink(missing_ok=True)
        journal = Journal(path, compact_bytes=1)
        made = [journal.append(decision(weight=float(weight))) for weight in range(6)]
        with monkeypatch.context() as patch:
            patch_call(patch, call, at, after)
            with contextlib.suppress(Crash):
                journal.compact(newest_two)
        with contextlib.suppress(OSError):
            journal.close()
        assert read_decisions(path) in (made, made[-2:])
        with Journal(path) as journal:
            assert journal.last() == made[-1]
            assert journal.append(decision()).seq == 7
        assert [found.name for found in tmp_path.iterdir()] == [path.name], "nothing is left beside it"


def patch_call(patch: pytest.MonkeyPatch, call: str, at: int, after: bool) -> None:
    """The `at`-th call of that name is the last thing the process does; or the next one would have been."""
    owner: Any = Path if call == "replace" else os
    real, count = getattr(owner, call), 0

    def dying(*args: Any, **changes: Any) -> Any:
        nonlocal count
        count += 1
        if count == at and not after:
            raise Crash
        result = real(*args, **changes)
        if count == at:
            raise Crash
        return result

    patch.setattr(owner, call, dying)


def test_a_writer_killed_at_any_moment_loses_no_decision_that_was_confirmed(tmp_path: Path) -> None:
    """SIGKILL, thirty times over one journal, while it is appended to and compacted all the time."""
    path, draw, acknowledged, compacted = tmp_path / "journal.jsonl", random.Random(1), 0, set[str]()
    for _ in range(30):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            write_until_killed(path, tell)
        os.close(tell)
        with os.fdopen(told, "rb") as stream:
            first = stream.readline()  # it is at work
            time.sleep(draw.random() * 0.02)
            hit(child)
            os.waitpid(child, 0)
            rest = stream.read().split(b"\n")
        acknowledged = max(acknowledged, int(first), *(int(line) for line in rest[:-1]))
        found = read_decisions(path)
        assert [d.seq for d in found] == sorted({d.seq for d in found})
        assert found[-1].seq >= acknowledged
        assert found[-1] == last_decision(path)
        assert found[-1].reason == f"number {found[-1].seq}"
        compacted.add(path.read_text().partition("\n")[0])
    assert len(compacted) > 5, "it was compacted between most kills"


def write_until_killed(path: Path, tell: int) -> None:
    """In a child process: never returns."""
    try:
        with Journal(path, compact_bytes=2000) as journal:
            number = last.seq if (last := journal.last()) else 0
            while True:
                number += 1
                journal.append(decision(reason=f"number {number}"))
                os.write(tell, b"%d\n" % number)
                journal.compact(newest_two)
    finally:
        os._exit(1)
