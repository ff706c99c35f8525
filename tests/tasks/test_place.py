"""What becomes of a stage that ran elsewhere. That it runs there for real is seen in e2e/."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Crashed, Failed

from serin.artifacts import Dataset
from serin.errors import StageFailed, StageLost
from tasks import place as task_module
from tasks.place import run_stage

pytestmark = pytest.mark.usefixtures("prefect_server")

DATASET = Dataset(path="/datasets/1", digest="0123abcd", rows={"train": 8})
PLAIN = {"path": "/datasets/1", "digest": "0123abcd", "rows": {"train": 8}}


class FakeWorkers:
    """Ends each run that is asked for with the next of `states`."""

    def __init__(self, *states: State[Any]) -> None:
        self.states = list(states)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def run(self, name: str, *, parameters: dict[str, Any], poll_interval: float) -> FlowRun:
        self.asked.append((name, parameters))
        return FlowRun(flow_id=uuid4(), name=f"run-{len(self.asked)}", state=self.states.pop(0))


def place(workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setattr(task_module, "arun_deployment", workers.run)
    monkeypatch.setattr(run_stage, "retry_delay_seconds", 0)

    @flow
    async def parent() -> Dataset:
        return await run_stage("etl", Dataset, spec={"name": "parcels"}, before=DATASET)

    return asyncio.run(parent())


def test_a_stage_is_told_in_json_and_gives_an_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkers(Completed(data=PLAIN))
    assert place(workers, monkeypatch) == DATASET
    assert workers.asked == [("etl/placed", {"spec": {"name": "parcels"}, "before": PLAIN})]


def test_a_stage_that_failed_fails_here_with_its_words_and_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = FakeWorkers(Failed(message="ColumnMissing: 'weigth' is not in 'parcels'"))
    with pytest.raises(StageFailed, match="etl failed in run 'run-1': ColumnMissing: 'weigth'"):
        place(workers, monkeypatch)
    assert len(workers.asked) == 1


def test_a_stage_whose_machine_was_lost_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkers(Crashed(message="exit code -9"), Completed(data=PLAIN))
    assert place(workers, monkeypatch) == DATASET
    assert len(workers.asked) == 2


def test_a_stage_that_is_lost_every_time_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkers(*[Crashed(message="exit code -9") for _ in range(3)])
    with pytest.raises(StageLost, match="exit code -9"):
        place(workers, monkeypatch)
