"""Schedules and automations on a real stack: they make runs, an event starts a retraining, nothing is doubled.

python -m tests.chaos.schedules      about two minutes; prints how long each took
"""

import os
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serin.host.state import running_stack
from serin.prefect.login import stack_api
from serin.prefect.rest_api import Api, call
from tests.kit.commands import serin_process
from tests.kit.waiting import until as wait_until

_SECONDS = 300.0


def until(true: Callable[[], bool], what: str) -> None:
    began = time.monotonic()
    wait_until(true, what, within_s=_SECONDS, every_s=0.2)
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
        "serin, refresh lookups when a table of theirs has changed",
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
        variables = {**os.environ, "SERIN_HOME": str(home)}
        serin_process("up", env=variables)
        try:
            api = stack_api(running_stack(home))
            _plans_and_reacts(api)
            assert "retrain/scheduled" in serin_process("deploy", env=variables).stdout
            _plans_and_reacts(api)
        finally:
            serin_process("down", env=variables)


if __name__ == "__main__":
    main()
