"""A run that a SerinError ends says so in one line; an unexpected error keeps its traceback. With a real server."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, get_client, task
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import State
from prefect.logging.handlers import APILogHandler

from flows.pipeline import pipeline
from flows.roll_out import roll_out
from serin.errors import ControllerSilent, GateFailed, RolloutFailed, StageFailed
from serin.rollout.decide.state import Verdict
from serin.store.store import Store
from tasks.outcome import outcome_as_state
from tests.fakes.rollout import FakeJudge
from tests.fakes.running_controller import running_controller
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

pytestmark = pytest.mark.usefixtures("prefect_server", "home")


def ended(run: Callable[[], Awaitable[Any]]) -> tuple[State[Any], list[str]]:
    """How a flow ended, and all that its log and those of its tasks hold."""

    async def follow() -> tuple[State[Any], list[str]]:
        state = await run()
        await APILogHandler.aflush()
        wanted = LogFilterFlowRunId(any_=[state.state_details.flow_run_id])
        async with get_client() as client:
            entries = await client.read_logs(LogFilter(flow_run_id=wanted), limit=200)
        return state, [entry.message for entry in entries]

    return asyncio.run(follow())


@pytest.fixture
def two_versions(home: Path, tmp_path: Path) -> None:
    store = Store.open()
    for steps in ([100], [25, 100]):
        with store.workspace() as folder:
            rollout = {"steps": steps, "step_time": "0s", "bake": "0s", "min_requests": 0}
            write_spec(folder, small_spec(tmp_path / "data", rows=10, rollout=rollout))
            (folder / "manifest.json").write_text("{}")
            store.publish_bundle(NAME, store.reserve_version(NAME), folder)


@pytest.mark.usefixtures("two_versions")
def test_a_rollback_ends_the_flow_failed_with_one_line_and_no_traceback(home: Path) -> None:
    with running_controller(home, NAME, FakeJudge(step_s=0, bake_s=0, verdicts={25.0: Verdict.FAIL})):
        asyncio.run(roll_out(NAME, 1))
        state, log = ended(lambda: roll_out(NAME, 2, return_state=True))
    assert state.is_failed()
    assert state.message.startswith(f"release {NAME}-v2 was rolled back: ")
    assert state.message.endswith(f"`serin rollout report {NAME}` writes the full report")
    assert "\n" not in state.message
    assert [line for line in log if "Traceback" in line or "Finished in state" in line] == []
    assert log[-1] == f"the run failed: {state.message}"
    assert sum(state.message in line for line in log) == 1
    with pytest.raises(RolloutFailed, match="was rolled back"):
        asyncio.run(state.aresult())


def test_a_spec_that_does_not_fit_its_table_ends_the_pipeline_without_a_traceback(tmp_path: Path) -> None:
    spec = small_spec(tmp_path / "data", rows=10)
    spec["features"][0]["columns"] = ["weigth", "distance"]
    state, log = ended(lambda: pipeline(spec, serve=False, return_state=True))
    assert state.is_failed()
    assert "did you mean 'weight'" in (state.message or "")
    assert not [line for line in log if "Traceback" in line]


@pytest.mark.parametrize(
    ("error", "traceback"),
    [
        (GateFailed(stage="scores", what="'score' differs", found="torch 0.1, graph 0.9"), False),
        (StageFailed(stage="export", run="wise-owl", reason="worse than the live version"), False),
        (ControllerSilent(model="m", command="start", waited_s=1.0), False),
        (TypeError("a bug"), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_only_unexpected_errors_keep_their_traceback(error: Exception, traceback: bool) -> None:
    @task
    async def stage() -> None:
        raise error

    @flow
    @outcome_as_state
    async def one() -> None:
        await stage()

    state, log = ended(lambda: one(return_state=True))
    assert state.is_failed()
    assert str(error) in (state.message or "")
    assert any("Traceback" in line for line in log) is traceback


def test_at_debug_level_prefects_own_lines_stay(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        caplog.set_level(logging.DEBUG, name)

    @task
    async def stage() -> None:
        raise GateFailed(stage="scores", what="'score' differs", found="torch 0.1, graph 0.9")

    @flow
    @outcome_as_state
    async def one() -> None:
        await stage()

    _, log = ended(lambda: one(return_state=True))
    assert any("Traceback" in line for line in log)
    assert any(line.startswith("Finished in state Failed") for line in log)


def test_an_error_that_is_tried_again_is_one_line_and_a_good_end_another() -> None:
    tries = []

    @task(retries=1)
    async def stage() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise ControllerSilent(model="m", command="start", waited_s=1.0)

    @flow
    @outcome_as_state
    async def one() -> None:
        await stage()

    _, log = ended(lambda: one(return_state=True))
    silent = ControllerSilent(model="m", command="start", waited_s=1.0)
    assert [line for line in log if not line.startswith(("Beginning", "View at"))] == [
        f"{silent}; trying again immediately",
        "the run completed",
    ]
