"""Submitting and following a rollout, with a real controller on fake machines."""

import asyncio
from pathlib import Path

import pytest
from prefect import flow
from prefect.artifacts import Artifact

from serin.errors import ControllerSilent, RolloutFailed, RolloutRefused
from serin.pipeline import roll_out as use_case
from serin.rollout.decide.state import Phase, Verdict
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Answer, Command, Mailbox
from serin.rollout.run.status import history, model_status
from serin.spec.pipeline import PipelineSpec
from serin.spec.rollout import RolloutSpec
from serin.store.artifacts import Release
from tasks.roll_out import roll_out_release
from tests.fakes.rollout import FakeFleet, FakeJudge
from tests.fakes.running_controller import running_controller
from tests.kit.waiting import until

pytestmark = pytest.mark.usefixtures("prefect_server")

FIRST, SECOND = Release(model="flights", version=1), Release(model="flights", version=2)
SPEC = PipelineSpec.model_construct(
    name="flights", rollout=RolloutSpec(steps=(50, 100), step_time=0, bake=0, min_requests=0)
)


def roll_out(release: Release) -> Release:
    @flow
    async def one() -> Release:
        return await roll_out_release(SPEC, release)

    return asyncio.run(one())


def _wait_for(home: Path, phase: Phase) -> None:
    until(lambda: any(found.phase == phase for found in history(home, "flights")), f"{phase}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use_case, "_POLL_S", 0.05)


def test_a_release_is_live_when_the_task_has_ended(home: Path) -> None:
    with running_controller(home, "flights"):
        assert roll_out(FIRST) == FIRST
        assert roll_out(SECOND) == SECOND
    status = model_status(home, "flights")
    assert (status.live, status.previous) == (2, 1)
    story = Artifact.get("flights-rollout")
    assert "promoted" in story.data
    assert "| 50% |" in story.data


def test_a_release_that_is_live_already_is_left_alone(home: Path) -> None:
    with running_controller(home, "flights"):
        roll_out(FIRST)
    before = history(home, "flights")
    assert roll_out(FIRST) == FIRST  # no controller is needed for that
    assert history(home, "flights") == before


def test_a_rollback_fails_the_task_with_the_controllers_reason(home: Path) -> None:
    with running_controller(home, "flights", FakeJudge(step_s=0, bake_s=0, verdicts={50.0: Verdict.FAIL})):
        roll_out(FIRST)
        with pytest.raises(RolloutFailed, match=r"flights-v2 was rolled back: .*said fail"):
            roll_out(SECOND)
    story = Artifact.get("flights-rollout")
    assert "rolled_back" in story.data


def test_a_release_that_answers_its_golden_rows_wrongly_fails_the_task(home: Path) -> None:
    with (
        running_controller(home, "flights", fleet=FakeFleet(wrong={"flights-v1"})),
        pytest.raises(RolloutFailed, match="golden rows"),
    ):
        roll_out(FIRST)


def test_a_version_cannot_jump_the_queue(home: Path) -> None:
    waiting = FakeJudge(step_s=0, bake_s=0, verdicts={50.0: Verdict.WAIT})
    with running_controller(home, "flights", waiting):
        roll_out(FIRST)
        home_rollouts(home).mailbox.ask(Command(kind="start", model="flights", version=2, by="somebody"))
        with pytest.raises(RolloutRefused, match="version 2 is"):
            roll_out(Release(model="flights", version=3))


def test_a_run_that_died_does_no_harm_and_the_next_one_follows_on(home: Path) -> None:
    judge = FakeJudge(step_s=0, bake_s=0, verdicts={50.0: Verdict.WAIT})

    @flow
    async def dies_on_the_way() -> None:
        following = asyncio.create_task(roll_out_release(SPEC, SECOND))
        await asyncio.to_thread(_wait_for, home, Phase.SHIFTING)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    with running_controller(home, "flights", judge):
        roll_out(FIRST)
        asyncio.run(dies_on_the_way())
        under_way = model_status(home, "flights")
        assert under_way.rollout.running
        judge.verdicts.clear()
        assert roll_out(SECOND) == SECOND
    assert len({found.rollout for found in history(home, "flights")}) == 2


def test_without_a_controller_the_command_is_taken_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Mailbox.ask

    def impatient(mailbox: Mailbox, command: Command) -> Answer:
        return ask(mailbox, command, timeout_s=0.2)

    monkeypatch.setattr(Mailbox, "ask", impatient)
    monkeypatch.setattr(roll_out_release, "retry_delay_seconds", 0)
    with pytest.raises(ControllerSilent, match="serin status"):
        roll_out(FIRST)
    assert list((home / "rollouts" / "inbox").iterdir()) == []
