"""A version by name, rolled out as its own spec says."""

import asyncio
from pathlib import Path
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState
from prefect.flow_runs import resume_flow_run

from flows import roll_out as flow_module
from flows.roll_out import roll_out
from serin.errors import NotFound, RolloutFailed
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command, Kind
from serin.rollout.run.status import history, model_status
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.fakes.running_controller import running_controller
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(autouse=True)
def versions(home: Path, tmp_path: Path) -> None:
    store = Store.open()
    for steps, approve in (([100], []), ([25, 100], []), ([25, 100], [100])):
        with store.workspace() as folder:
            rollout = {"steps": steps, "approve": approve, "step_time": "0s", "bake": "0s", "min_requests": 0}
            write_spec(folder, small_spec(tmp_path / "data", rows=10, rollout=rollout))
            (folder / "manifest.json").write_text("{}")
            store.publish_bundle(NAME, store.reserve_version(NAME), folder)


def test_a_version_is_rolled_out_by_the_steps_of_its_own_spec(home: Path) -> None:
    with running_controller(home, NAME):
        assert asyncio.run(roll_out(NAME, 1)) == Release(model=NAME, version=1)
        assert asyncio.run(roll_out(NAME, 2)) == Release(model=NAME, version=2)
    status = model_status(home, NAME)
    assert status.rollout.steps == (25.0, 100.0)


async def _roll_out_and_answer(**answer: object) -> Release:
    """The newest version; what its run asks is answered as a person would in Prefect's page."""
    running = asyncio.create_task(roll_out(NAME))
    async with get_client() as client:
        for _ in range(300):
            if running.done() or (asking := await _asking(client)):
                break
            await asyncio.sleep(0.1)
        assert not running.done(), running.exception() or running.result()
        assert len(asking) == 1
        await resume_flow_run(asking[0], run_input=answer)
    return await running


async def _asking(client: PrefectClient) -> list[UUID]:
    """Runs that can be answered. Prefect pauses a run first and stores the form of the answer a moment later."""
    wanted = FlowRunFilter(state=FlowRunFilterState(name={"any_": ["Paused"]}))
    found = []
    for run in await client.read_flow_runs(flow_run_filter=wanted):
        keys = run.state.state_details.run_input_keyset
        if keys and await client.filter_flow_run_input(run.id, keys["schema"], limit=1, exclude_keys=set()):
            found.append(run.id)
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "_POLL_S", 0.2)


@pytest.mark.usefixtures("impatient")
def test_the_newest_version_waits_for_the_approval_its_spec_asks_for(home: Path) -> None:
    with running_controller(home, NAME):
        asyncio.run(roll_out(NAME, 1))
        assert asyncio.run(_roll_out_and_answer(approve=True, why="looks good")) == Release(
            model=NAME, version=3
        )
    approved = [decision for decision in history(home, NAME) if decision.reason.endswith(": looks good")]
    assert len(approved) == 1
    assert "flow run" in approved[0].by


@pytest.mark.usefixtures("impatient")
def test_an_approval_that_is_denied_ends_the_rollout(home: Path) -> None:
    with running_controller(home, NAME):
        asyncio.run(roll_out(NAME, 1))
        with pytest.raises(RolloutFailed, match="not today"):
            asyncio.run(_roll_out_and_answer(approve=False, why="not today"))
    status = model_status(home, NAME)
    assert status.live == 1


async def _roll_out_while(command: Kind, home: Path) -> Release:
    """The newest version; what its run asks is answered by a command, not in Prefect's page."""
    running = asyncio.create_task(roll_out(NAME))
    async with get_client() as client:
        for _ in range(300):
            if running.done() or await _asking(client):
                break
            await asyncio.sleep(0.1)
    by_hand = Command(kind=command, model=NAME, by="ann", why="by hand")
    told = await asyncio.to_thread(home_rollouts(home).mailbox.ask, by_hand, timeout_s=30.0)
    assert told.accepted, told.reason
    return await running


@pytest.mark.usefixtures("impatient")
def test_a_run_that_asks_continues_when_somebody_answers_elsewhere(home: Path) -> None:
    with running_controller(home, NAME):
        asyncio.run(roll_out(NAME, 1))
        with pytest.raises(RolloutFailed, match="by hand"):
            asyncio.run(_roll_out_while("abort", home))
        assert asyncio.run(_roll_out_while("approve", home)) == Release(model=NAME, version=3)
    said = [decision for decision in history(home, NAME) if decision.command and decision.by == "ann"]
    assert [decision.reason for decision in said] == ["abort by ann: by hand", "approve by ann: by hand"]


def test_a_model_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(NotFound, match=f"did you mean '{NAME}'"):
        asyncio.run(roll_out("late-parcel"))
