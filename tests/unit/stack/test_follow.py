"""Following a run whose server answers from a list. The real one is in tests/e2e/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from serin.errors import NotUp, PipelineFailed, PrefectGone
from serin.stack.host.state import Stack
from serin.stack.prefect import follow, rest_api
from serin.stack.prefect.follow import RunLog, follow_run, last_line
from serin.stack.prefect.login import PrefectServer
from serin.stack.prefect.rest_api import Api
from tests.logs import heard

BEGAN = datetime(2026, 11, 15, tzinfo=UTC)
API = Api("http://nowhere/api")
LAST = "the run completed"


@dataclass
class Server:
    """Gives the lines it has, as Prefect's would: by time, at most as many as asked for."""

    lines: list[tuple[float, str, str | None]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)  # one after the other; "" is no answer
    lasts_s: float = 60.0  # since when it is in the state that is asked for
    happens: list[tuple[float, str, str | None]] = field(default_factory=list)  # said after the last state
    message: str | None = None  # of the state

    def call(self, _: Api, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if method == "GET":
            assert path == "/flow_runs/7"
            state = self.states.pop(0)
            if not self.states:
                self.lines += self.happens
            if not state:
                raise PrefectGone(url="http://nowhere/api", reason="it is being restarted")
            since = datetime.now(UTC) - timedelta(seconds=self.lasts_s)
            return {
                "state_type": state,
                "state": {"type": state, "timestamp": since.isoformat(), "message": self.message},
            }
        assert body is not None
        assert body["logs"]["flow_run_id"] == {"any_": ["7"]}
        after = datetime.fromisoformat(
            body["logs"].get("timestamp", {"after_": "2000-01-01T00:00+00:00"})["after_"]
        )
        entries = [
            {
                "id": text,
                "timestamp": (BEGAN + timedelta(seconds=at)).isoformat(),
                "message": text,
                "task_run_id": task,
                "level": 40 if "error" in text else 20,
                "name": "prefect.flow_runs.worker" if text.startswith("Worker") else "prefect.flow_runs",
            }
            for at, text, task in sorted(self.lines)
            if BEGAN + timedelta(seconds=at) >= after
        ]
        return entries[body["offset"] : body["offset"] + body["limit"]]


@dataclass
class Up:
    """What a follower asks of a stack."""

    is_alive: bool = True


def of_stack(home: Path, *, alive: bool = True) -> PrefectServer:
    return PrefectServer(home=home, api=API, stack=cast("Stack", Up(is_alive=alive)))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(follow, "call", made.call)
    monkeypatch.setattr(rest_api, "call", made.call)
    for name in ("_POLL_S", "_LAST_POLL_S"):
        monkeypatch.setattr(follow, name, 0.0)
    return made


def test_every_line_is_given_once_however_many_and_however_late(server: Server) -> None:
    log = RunLog(API, "7")
    server.lines = [(number / 100, f"line {number}", None) for number in range(450)]
    assert log.new_lines() == [(BEGAN.timestamp() + at, text) for at, text, _ in server.lines]
    server.lines += [(2.0, "late", None), (60.0, "new", None)]
    assert [line for _, line in log.new_lines()] == ["late", "new"]
    assert log.new_lines() == []


def test_a_task_that_has_finished_is_not_the_run_s_end(server: Server) -> None:
    log = RunLog(API, "7")
    server.lines = [(1.0, LAST, "a-task")]
    log.new_lines()
    assert not log.has_ended
    server.lines.append((2.0, last_line("Failed", "no reason"), None))
    log.new_lines()
    assert log.has_ended


def _follow(tmp_path: Path, *, alive: bool = True) -> list[str]:
    said: list[str] = []
    with heard(said.append):
        follow_run(of_stack(tmp_path, alive=alive), "7", what="spec.yaml", log=RunLog(API, "7"))
    return said


def test_a_run_is_followed_past_a_restart_of_the_server_to_its_last_line(
    server: Server, tmp_path: Path
) -> None:
    server.lines = [(1.0, "it is trained", None)]
    server.states, server.happens = ["PENDING", "RUNNING", "", "COMPLETED"], [(9.0, LAST, None)]
    assert _follow(tmp_path) == ["it is trained"]


def test_how_prefect_gets_to_the_flow_is_left_out_but_what_went_wrong_with_it_is_not(server: Server) -> None:
    server.lines = [
        (1.0, "Worker 'cpu' submitting flow run '7'", None),
        (1.1, "Worker 'cpu' error: no such folder", None),
        (1.2, "Running 1 deployment pull step(s)", None),
        (1.3, "Executing deployment step: enter_application", None),
        (1.4, "Beginning flow run 'calm-owl' for flow 'pipeline'", None),
        (1.5, "Beginning flow run of another kind", "a-task"),
    ]
    assert [line for _, line in RunLog(API, "7").new_lines()] == [
        "Worker 'cpu' error: no such folder",
        "Beginning flow run of another kind",
    ]


@pytest.mark.parametrize(
    ("end", "message", "words"),
    [
        (
            "FAILED",
            "release flights-v2 was rolled back",
            "spec.yaml failed: release flights-v2 was rolled back\n",
        ),
        ("CRASHED", "its process is gone", "spec.yaml crashed: its process is gone\n"),
        ("CANCELLED", None, "spec.yaml was cancelled\n"),
    ],
)
def test_a_run_that_ends_badly_is_an_error_with_its_reason_after_all_it_said(
    end: str, message: str | None, words: str, server: Server, tmp_path: Path
) -> None:
    server.message = message
    server.states = ["RUNNING", end]
    server.happens = [(8.0, "one more", None), (9.0, last_line(end.capitalize(), message or ""), None)]
    said: list[str] = []
    with heard(said.append), pytest.raises(PipelineFailed) as failed:
        follow_run(of_stack(tmp_path), "7", what="spec.yaml", log=RunLog(API, "7"))
    assert said == ["one more"]
    assert str(failed.value) == f"the run of {words}http://nowhere/runs/flow-run/7 shows all of it"


def test_a_run_whose_stack_has_gone_is_not_waited_for(server: Server, tmp_path: Path) -> None:
    server.states = ["RUNNING", "RUNNING"]
    with pytest.raises(NotUp):
        _follow(tmp_path, alive=False)


def test_a_run_that_has_just_crashed_is_followed_when_it_is_queued_again(
    server: Server, tmp_path: Path
) -> None:
    server.lasts_s = 1.0
    server.states, server.happens = (
        ["RUNNING", "CRASHED", "SCHEDULED", "RUNNING", "COMPLETED"],
        [(9.0, LAST, None)],
    )
    assert _follow(tmp_path) == []


def test_a_server_that_is_slow_to_answer_is_asked_again_for_the_same_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[str] = []

    def call(_: Api, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if method == "GET":
            return {"id": "d"}
        assert body is not None
        keys.append(body["idempotency_key"])
        if len(keys) < 3:
            raise PrefectGone(url=API.url, reason="timed out")
        return {"id": "7", "name": "calm-owl"}

    monkeypatch.setattr(follow, "call", call)
    assert follow.begin_run(API, "pipeline/placed", {}, tags=[])["id"] == "7"
    assert len(keys) == 3
    assert len(set(keys)) == 1
