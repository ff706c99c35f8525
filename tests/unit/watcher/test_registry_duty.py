"""The duty that has MLflow's aliases follow the rollouts: when it begins an attempt, and what it does after one."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from serin.watcher import registry_duty
from serin.watcher.registry_duty import RegistryDuty, _Attempt
from tests.fakes.rollout import FakeVersions
from tests.kit.waiting import until
from tests.unit.rollout.conftest import Scene


class Attempts:
    """Stands for the processes; each ends as the test says."""

    def __init__(self) -> None:
        self.wanted: list[Any] = []
        self.outcome: str | None = None
        self.ended = 0

    def __call__(self, wanted: Any, now: float) -> Attempts:
        del now
        self.wanted.append(wanted)
        return self

    def problem(self, now: float) -> str | None:
        del now
        return self.outcome

    def end(self) -> None:
        self.ended += 1


class Made(Attempts):
    """One that knows what it was begun with, as a process does."""

    def __call__(self, wanted: Any, now: float) -> Any:
        super().__call__(wanted, now)
        found = Attempts()
        found.__dict__ = {**self.__dict__, "wanted": wanted}
        found.problem = lambda now: self.outcome  # type: ignore[method-assign]
        found.end = self.end  # type: ignore[method-assign]
        return found


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()
    monkeypatch.setattr(registry_duty, "_Attempt", made)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example")
    return made


@pytest.fixture
def scene(home: Path) -> Scene:
    made = Scene(home, versions=FakeVersions({"flights": [1, 2]}))
    made.promote_first(model="flights")
    return made


def test_nothing_begins_without_an_mlflow_server(
    home: Path, scene: Scene, attempts: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    RegistryDuty(home).tick(0.0)
    assert attempts.wanted == []


def test_an_attempt_begins_for_each_change_and_for_nothing_else(
    home: Path, scene: Scene, attempts: Made
) -> None:
    duty, attempts.outcome = RegistryDuty(home), ""
    for now in (0.0, 5.0, 10.0, 15.0):
        duty.tick(now)
    live = {"flights": {"champion": 1, "candidate": None}}
    assert attempts.wanted == [live]
    scene.command("start", 2, model="flights")
    scene.tick()
    for now in (20.0, 25.0, 30.0):
        duty.tick(now)
    assert attempts.wanted == [live, {"flights": {"champion": 1, "candidate": 2}}]


def test_a_failed_attempt_is_repeated_less_and_less_often(
    home: Path, scene: Scene, attempts: Made, caplog: pytest.LogCaptureFixture
) -> None:
    duty, attempts.outcome = RegistryDuty(home), "no server answers"
    begun = []
    for now in range(0, 3000, 5):
        before = len(attempts.wanted)
        duty.tick(float(now))
        if len(attempts.wanted) > before:
            begun.append(now)
    pauses = [second - first for first, second in itertools.pairwise(begun)]
    assert pauses[:4] == [10, 15, 25, 45]
    assert max(pauses) <= 310
    assert "no server answers" in caplog.text
    attempts.outcome, before = "", len(attempts.wanted)
    for now in range(3000, 4000, 5):
        duty.tick(float(now))
    assert len(attempts.wanted) <= before + 1


def test_a_running_attempt_is_waited_for_and_ended_with_the_watcher(
    home: Path, scene: Scene, attempts: Made
) -> None:
    duty = RegistryDuty(home)
    for now in (0.0, 5.0, 500.0):
        duty.tick(now)
    assert len(attempts.wanted) == 1
    duty.close()
    assert attempts.ended == 1


def finished(attempt: _Attempt, now: float = 0.0) -> str:
    found: list[str] = []

    def look() -> bool:
        problem = attempt.problem(now)
        if problem is not None:
            found.append(problem)
        return bool(found)

    until(look, "the attempt ends", within_s=120)
    return found[0]


def test_the_process_says_why_it_failed(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said = finished(_Attempt({"flights": {"champion": None, "candidate": None}}, 0.0))
    assert said.startswith("flights: ")
    assert "127.0.0.1" in said


def test_a_process_that_hangs_is_ended(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text(f"#!{sys.executable}\nimport sys, time\nsys.stdin.read()\ntime.sleep(600)\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(registry_duty.sys, "executable", str(sleeper))
    attempt = _Attempt(json.loads("{}"), 0.0)
    assert attempt.problem(1.0) is None
    assert attempt.problem(1000.0) == "not done within 900 s"
    assert attempt._process.poll() is not None
