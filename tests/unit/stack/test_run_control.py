"""Cancelling a run whose server answers from a list. The real one is in tests/e2e/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serin.errors import RunNotCancellable
from serin.stack.host.run_processes import RunProcesses
from serin.stack.prefect import run_control
from serin.stack.prefect.run_control import cancel_run


@dataclass
class Server:
    """A run whose states are seen one after the other; the last one stays."""

    states: list[str]
    asked: list[str] = field(default_factory=list)  # the states that were requested

    def call(self, _: Any, method: str, path: str, body: Mapping[str, Any]) -> Any:
        if path.endswith("/set_state"):
            self.asked.append(body["state"]["type"])
            return None
        assert (method, path) == ("POST", "/flow_runs/filter")
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return [{"id": "7", "name": "brave-owl", "state_type": state, "state_name": state.title()}]


@dataclass
class Clock:
    """Every look at a run takes half a second of it."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Up:
    home: Path
    is_alive: bool = True
    api: None = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    found = Clock()
    monkeypatch.setattr(run_control, "time", found)
    monkeypatch.setattr(run_control, "needed_server", lambda _: Up(tmp_path))
    monkeypatch.setattr(run_control, "run_processes", lambda _: {})
    return found


def _serve(monkeypatch: pytest.MonkeyPatch, *states: str) -> Server:
    server = Server([*states])
    monkeypatch.setattr(run_control, "call", server.call)
    return server


def test_a_run_that_reports_a_crash_before_its_worker_says_cancelled_is_cancelled(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = _serve(monkeypatch, "RUNNING", "CANCELLING", "CRASHED", "CRASHED", "CRASHED", "CANCELLED")
    assert cancel_run(tmp_path, "brave-owl") == "brave-owl"
    assert server.asked == ["CANCELLING"]
    assert clock.now == 2.0


def test_a_run_that_stays_crashed_is_reported_as_that_before_the_time_for_cancelling_is_over(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _serve(monkeypatch, "RUNNING", "CANCELLING", "CRASHED")
    with pytest.raises(RunNotCancellable, match="crashed"):
        cancel_run(tmp_path, "brave-owl")
    assert run_control._SETTLE_S <= clock.now < run_control._CANCEL_S / 2


def test_a_run_whose_processes_are_left_is_waited_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _serve(monkeypatch, "RUNNING", "CANCELLED")
    left = {"7": RunProcesses(engines=(1,), others=())}
    monkeypatch.setattr(run_control, "run_processes", lambda _: left if clock.now < 5.0 else {})
    cancel_run(tmp_path, "brave-owl")
    assert clock.now == 5.0


def test_a_run_that_has_ended_cannot_be_cancelled(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = _serve(monkeypatch, "COMPLETED")
    with pytest.raises(RunNotCancellable, match="completed"):
        cancel_run(tmp_path, "brave-owl")
    assert server.asked == []
    assert clock.now == 0.0
