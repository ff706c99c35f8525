"""Schedules and automations on a real stack: they make runs, an event starts a retraining, nothing is doubled.

python -m tests.chaos.schedules      about two minutes; prints how long each took
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serin.stack.host.state import running_stack
from serin.stack.prefect.login import stack_api
from serin.stack.prefect.rest_api import Api, call

_SECONDS = 300.0


def serin(home: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "serin.cli", *arguments],
        env={**os.environ, "SERIN_HOME": str(home)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def until(true: Callable[[], bool], what: str) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < _SECONDS, f"{what}: not within {_SECONDS:.0f} s"
        time.sleep(0.2)
    print(f"{what}: {time.monotonic() - began:.1f} s")


def _plans_and_reacts(api: Api) -> None:
    """Schedules have made runs; an event about a model starts its retraining, once."""
    event = {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "serin.drift",
        "resource": {"prefect.resource.id": "serin.model.parcels", "serin.model": "parcels"},
        "payload": {"text": "a chaos test"},
    }
    asked = {"why": "drift", "model": "parcels", "reason": event["payload"]}
    already = len(_runs(api, **asked))
    automations = call(api, "POST", "/automations/filter", {})
    assert sorted(found["name"] for found in automations) == [
        "serin, retrain on drift",
        "serin, retrain when live quality falls",
        "serin, retrain when the tables of a model have changed",
    ]
    call(api, "POST", "/events", [event])
    until(lambda: len(_runs(api, **asked)) > already, "a run for the event")
    until(lambda: len(_runs(api, why="nightly")) >= 2, "the next nights are planned")
    until(lambda: len(_runs(api)) >= 2, "the next looks are planned")
    assert {run["expected_start_time"][11:19] for run in _runs(api, why="nightly")} == {"02:00:00"}
    assert len(_runs(api, **asked)) == already + 1


def _runs(api: Api, **parameters: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call(api, "POST", "/flow_runs/filter", {})
    return [run for run in found if run["parameters"] == parameters]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="serin-schedules-") as folder:
        home = Path(folder) / "home"
        serin(home, "up")
        try:
            api = stack_api(running_stack(home))
            _plans_and_reacts(api)
            assert "retrain/scheduled" in serin(home, "deploy")
            _plans_and_reacts(api)
        finally:
            serin(home, "down")


if __name__ == "__main__":
    main()
