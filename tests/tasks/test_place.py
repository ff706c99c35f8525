"""What becomes of a stage that ran elsewhere: runs on a real server, which nobody but the test carries out. That a
worker does is seen in e2e/."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, get_client
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.states import Cancelling, Crashed, Failed, Pending, Running

from serin.errors import StageFailed, StageLost
from serin.store.artifacts import Dataset
from serin.store.stage_keys import note, notes
from tasks import place as task_module
from tasks.place import request_run, run_stage

pytestmark = pytest.mark.usefixtures("prefect_server", "home")

DATASET = Dataset(path="/datasets/1", digest="0123abcd", rows={"train": 8})
PLAIN = {"path": "/datasets/1", "digest": "0123abcd", "rows": {"train": 8}}
COMPLETED = "completed"


@flow(persist_result=True, result_serializer="json")
async def stage() -> Dataset:
    return DATASET


class Workers:
    """Runs that are asked for come to the next of `ends`; those asked for by a name again are given again."""

    def __init__(self, *ends: State[Any] | str) -> None:
        self.ends = [self._done() if end == COMPLETED else end for end in ends]
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.runs: dict[str, UUID] = {}

    async def run(
        self, client: Any, name: str, parameters: dict[str, Any], key: str, job_variables: dict[str, Any]
    ) -> FlowRun:
        assert job_variables == {}
        self.asked.append((name, parameters))
        if key in self.runs:
            return FlowRun.model_validate(await client.read_flow_run(self.runs[key]))
        self.runs[key] = run = await self._begin(client, self.ends.pop(0))
        note(task_module.environment.home(), str(run), "etl", ran=True, why="no earlier result")
        return FlowRun(id=run, flow_id=uuid4(), name="child", state=Pending())

    @staticmethod
    async def _begin(client: Any, end: State[Any] | UUID) -> UUID:
        return (
            UUID(str((await client.create_flow_run(stage, state=end)).id)) if isinstance(end, State) else end
        )

    @staticmethod
    def _done() -> UUID:
        """A run that has completed, before and outside of the pipeline's."""
        return UUID(str(asyncio.run(stage(return_state=True)).state_details.flow_run_id))


def place(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.setattr(task_module, "request_run", workers.run)
    monkeypatch.setattr(task_module, "_AGAIN_S", 0.0)

    @flow
    async def parent() -> Dataset:
        return await run_stage("etl", Dataset, spec={"name": "parcels"}, before=DATASET)

    return asyncio.run(parent())


def test_a_stage_gets_json_and_gives_an_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(COMPLETED)
    assert place(workers, monkeypatch) == DATASET
    assert workers.asked == [("etl/placed", {"spec": {"name": "parcels"}, "before": PLAIN})]


def test_a_stage_that_failed_fails_here_with_its_words_and_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(Failed(message="ColumnMissing: 'weigth' is not in 'parcels'"))
    with pytest.raises(StageFailed, match="ColumnMissing: 'weigth'"):
        place(workers, monkeypatch)
    assert len(workers.runs) == 1


def test_a_stage_whose_machine_was_lost_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(Crashed(message="exit code -9"), COMPLETED)
    assert place(workers, monkeypatch) == DATASET
    assert len(workers.runs) == 2


def test_a_stage_that_is_lost_every_time_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(*[Crashed(message="exit code -9") for _ in range(3)])
    with pytest.raises(StageLost, match="exit code -9"):
        place(workers, monkeypatch)
    assert len(workers.runs) == 3


def test_a_stage_that_gives_no_sign_of_life_is_given_up_and_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker and process died together, and nobody said so."""
    monkeypatch.setattr(task_module, "_SILENT_S", 0.0)
    workers = Workers(Running(timestamp=datetime.now(UTC) - timedelta(hours=1)), COMPLETED)
    assert place(workers, monkeypatch) == DATASET
    first, second = workers.runs.values()
    assert first != second

    async def state_of(run: UUID) -> State[Any] | None:
        async with get_client() as client:
            return (await client.read_flow_run(run)).state

    given_up = asyncio.run(state_of(first))
    assert given_up.is_crashed()
    assert given_up.message == "no sign of life for 0 s"


def test_a_pipeline_that_is_run_again_continues_the_stage_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(COMPLETED)
    monkeypatch.setattr(task_module, "request_run", workers.run)
    seen = []

    @flow(retries=1)
    async def parent() -> Dataset:
        dataset = await run_stage("etl", Dataset, spec={"name": "parcels"})
        seen.append(dataset)
        assert len(seen) == 2, "it is killed here the first time"
        return dataset

    assert asyncio.run(parent()) == DATASET
    assert len(workers.runs) == 1


@pytest.mark.parametrize(
    ("asked", "then"),
    [(Cancelling(), "CANCELLING"), (Running(), "RUNNING")],
    ids=["cancelled with it", "left alone by one that was only stopped"],
)
def test_a_stage_is_cancelled_with_its_pipeline(
    asked: State[Any], then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(Running())
    monkeypatch.setattr(task_module, "request_run", workers.run)
    seen: list[UUID] = []

    @flow
    async def parent() -> Dataset:
        seen.append(UUID(str(task_module.flow_run.id)))
        return await run_stage("etl", Dataset, spec={"name": "parcels"})

    async def story() -> str:
        pipeline = asyncio.create_task(parent())
        async with asyncio.timeout(60) as limit, get_client() as client:
            while not workers.runs:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await client.set_flow_run_state(seen[0], asked, force=True)
            pipeline.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pipeline
            (stage_run,) = workers.runs.values()
            state = (await client.read_flow_run(stage_run)).state
        assert not limit.expired(), "it was the second cancellation that ended the pipeline"
        return str(state.type.value)

    assert asyncio.run(story()) == then


def test_a_pipeline_tells_why_the_stage_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "request_run", Workers(COMPLETED).run)

    @flow
    async def parent() -> str:
        await run_stage("etl", Dataset, spec={"name": "parcels"})
        return str(task_module.flow_run.id)

    (told,) = notes(task_module.environment.home(), asyncio.run(parent()))
    assert told["ran"]
    assert told["why"].endswith("no earlier result")


def test_a_requested_run_is_a_subflow_of_the_pipeline_and_the_same_for_the_same_key() -> None:
    async def story() -> tuple[list[FlowRun], TaskRun, UUID]:
        async with get_client() as client:
            about = await client.create_flow_from_name("etl")
            deployment = await client.create_deployment(about, f"place-{about}")

            @flow
            async def parent() -> list[FlowRun]:
                name, asked = f"etl/place-{about}", {"spec": "parcels.yaml"}
                return [await request_run(client, name, asked, key, {}) for key in ("one", "one", "two")]

            state = await parent(return_state=True)
            runs = await state.aresult()
            above = await client.read_task_run(runs[0].parent_task_run_id)
            await client.delete_deployment(deployment)  # tests of deployments have the same server
            return runs, above, state.state_details.flow_run_id

    (first, again, other), above, pipeline = asyncio.run(story())
    assert first.id == again.id != other.id
    assert first.state.is_scheduled()
    assert first.parameters == {"spec": "parcels.yaml"}
    assert (above.name, above.flow_run_id) == ("place etl", pipeline)
    assert again.parent_task_run_id == above.id != other.parent_task_run_id
