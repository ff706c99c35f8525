"""What a placed pipeline waits for: by the states of a stage's run, its receipt, and the times of the pipeline."""

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Pending, Running, Scheduled

from serin.store.receipt import Receipt
from serin.store.run_waits import run_waits
from serin.store.stage_keys import note, notes_file
from serin.store.waits import Wait
from tasks import waits as task_module
from tasks.waits import note_stage_waits

RUN = "a-pipeline"


@pytest.fixture(autouse=True)
def pipeline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "flow_run", SimpleNamespace(id=RUN))
    monkeypatch.setattr(task_module, "_ended", {})


def at(second: float) -> datetime:
    return datetime.fromtimestamp(1_000_000 + second, UTC)


def states() -> list[State[Any]]:
    """Of a run that was asked for at second 0, and worked on from 3 to 10."""
    made = (Scheduled(), Pending(timestamp=at(1)), Running(timestamp=at(3)), Completed(timestamp=at(10)))
    return list(made)


def ended_at(second: float) -> FlowRun:
    return FlowRun(id=uuid4(), flow_id=uuid4(), name="child", end_time=at(second))


def keep_receipt(home: Path, stage: str, began: float, seconds: float, *waits: Wait) -> None:
    receipt = Receipt(
        stage=stage, started=1_000_000 + began, seconds=seconds, device=(), rows=None, rows_per_s=None,
        data_wait_share=None, mfu=None, joules=None, cost=None, bound=None, advice="", waits=waits,
    )  # fmt: skip
    (home / "stages").mkdir(parents=True, exist_ok=True)
    receipt.write(home / "stages" / f"{stage}.json")
    note(home, RUN, stage, ran=True, why="no earlier result", receipt=f"stages/{stage}.json")


def noted(home: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in notes_file(home, RUN).read_text().splitlines()]
    found = [line["waits"] for line in lines if "waits" in line]
    return [{wait["what"]: round(wait["seconds"], 3) for wait in each} for each in found]


def test_the_time_around_a_stage_is_divided_by_what_took_it(home: Path) -> None:
    keep_receipt(home, "etl", 5.0, 4.0, Wait(what="a free GPU for etl", seconds=1.5))
    note_stage_waits("etl", ended_at(10), states(), asked=1_000_000.0, noticed=1_000_010.25)
    assert noted(home) == [
        {
            "Prefect gave etl to a worker": 1.0,
            "start of the process for etl": 2.0,
            "preparation of etl": 0.5,
            "report of etl and end of its run": 1.0,
            "news of the end of etl": 0.25,
        }
    ]
    assert [str(wait) for wait in run_waits(home, RUN)] == [
        "start of the process for etl 2.0 s", "a free GPU for etl 1.5 s", "Prefect gave etl to a worker 1.0 s",
    ]  # fmt: skip


def test_the_pipeline_itself_is_a_wait_between_two_stages(home: Path) -> None:
    note_stage_waits("etl", ended_at(10), states(), asked=1_000_000.0, noticed=1_000_010.0)
    note_stage_waits("train", ended_at(10), states(), asked=1_000_012.0, noticed=1_000_012.0)
    assert noted(home)[1]["pipeline between two stages"] == 2.0


def test_a_stage_without_a_receipt_of_this_run_is_no_reason_to_guess(home: Path) -> None:
    keep_receipt(home, "etl", -50.0, 4.0)  # found, not built
    note_stage_waits("etl", ended_at(10), states(), asked=1_000_000.0, noticed=1_000_010.5)
    (found,) = noted(home)
    assert list(found) == [
        "Prefect gave etl to a worker", "start of the process for etl", "news of the end of etl",
    ]  # fmt: skip
    assert found["news of the end of etl"] == 0.5
