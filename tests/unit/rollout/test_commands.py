from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from serin.errors import ControllerSilent
from serin.rollout.decide.plan import Plan
from serin.rollout.run.commands import Answer, Command, Inbox, ask, new_id, read_answer, submit


def command(**changes: Any) -> Command:
    return Command(**({"kind": "start", "model": "flights", "version": 2, "by": "ann"} | changes))


def test_a_command_arrives_as_it_was_sent_and_in_order(tmp_path: Path) -> None:
    sent = [command(plan=Plan(steps=(10.0, 100.0)), why="newer data"), command(kind="pause", version=None)]
    for each in sent:
        submit(tmp_path, each)
    assert Inbox(tmp_path).pending() == sent


def test_an_answer_takes_the_command_away(tmp_path: Path) -> None:
    inbox, command_id = Inbox(tmp_path), submit(tmp_path, command())
    assert read_answer(tmp_path, command_id) is None
    answer = Answer(id=command_id, accepted=True, reason="", rollout="r1")
    inbox.answer(answer)
    assert (inbox.pending(), read_answer(tmp_path, command_id)) == ([], answer)


def test_what_was_answered_is_not_answered_again(tmp_path: Path) -> None:
    inbox, command_id = Inbox(tmp_path), submit(tmp_path, command())
    waiting = tmp_path / "rollouts" / "inbox" / f"{command_id}.json"
    content = waiting.read_bytes()
    inbox.answer(Answer(id=command_id, accepted=False, reason="busy"))
    waiting.write_bytes(content)  # as after a crash between the answer and the end of the command
    assert (inbox.pending(), waiting.exists()) == ([], False)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": "serin.command", "version": 2}',
        json.dumps(command().to_json() | {"kind": "explode"}),
        json.dumps(command().to_json() | {"model": "../etc"}),
        json.dumps(command().to_json() | {"release": "two"}),
        json.dumps(command().to_json() | {"release": True}),
        json.dumps(command().to_json() | {"plan": {"steps": [1]}}),
        json.dumps(command().to_json() | {"plan": {"step_s": "soon"}}),
        json.dumps(command().to_json() | {"id": "another"}),
    ],
)
def test_a_file_that_is_not_a_command_is_answered_and_removed(tmp_path: Path, content: str) -> None:
    inbox = Inbox(tmp_path)
    (tmp_path / "rollouts" / "inbox" / "c1.json").write_text(content)
    good = submit(tmp_path, command())
    assert [each.id for each in inbox.pending()] == [good]
    answer = read_answer(tmp_path, "c1")
    assert answer is not None
    assert not answer.accepted
    assert answer.reason.startswith("not a command: ")


def test_ask_waits_for_the_answer(tmp_path: Path) -> None:
    inbox, question = Inbox(tmp_path), command()
    seen = threading.Event()

    def controller() -> None:
        while not seen.wait(0.01):
            for each in inbox.pending():
                inbox.answer(Answer(id=each.id, accepted=True, reason="", rollout="r1"))
                seen.set()

    thread = threading.Thread(target=controller)
    thread.start()
    try:
        assert ask(tmp_path, question, timeout_s=20).rollout == "r1"
    finally:
        seen.set()
        thread.join()


def test_a_command_nobody_answers_is_taken_back(tmp_path: Path) -> None:
    with pytest.raises(ControllerSilent, match="taken back"):
        ask(tmp_path, command(), timeout_s=0.1)
    assert Inbox(tmp_path).pending() == []


@pytest.mark.parametrize("name", ["../../secret", "", "a/b", "x" * 65])
def test_an_id_never_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a command id"):
        read_answer(tmp_path, name)


def test_ids_sort_by_time() -> None:
    ids = [new_id() for _ in range(50)]
    assert [each[:21] for each in ids] == sorted(each[:21] for each in ids)
