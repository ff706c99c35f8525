"""A published version to its clients. The controller does it and owns it; this submits, follows and shows.

A run that dies here does no harm: the rollout goes on, and the next run takes up following it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.runtime import flow_run

from serin.errors import RolloutFailed, RolloutRefused, RolloutUnfinished
from serin.formats.serving.journal import Decision
from serin.machine import environment
from serin.pipeline.follow_files import following, triton_line
from serin.reports.rollout_charts import evidence_drawing
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase
from serin.rollout.run.commands import Command, Kind, ask
from serin.rollout.run.status import model_status, reader
from serin.rollout.run.story import tell
from serin.spec.rollout import RolloutSpec
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Release
from tasks.approval import Approval
from tasks.markdown import drawing, table
from tasks.pictures import curves
from tasks.retry import error_is_retryable
from tasks.run_log import thinned

_POLL_S = 0.5
Say = Callable[[str], None]


@task(
    task_run_name="roll_out_release {release.name}",
    retries=3,
    retry_delay_seconds=2,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def roll_out_release(serving: ServingSpec, rollout: RolloutSpec, release: Release) -> Release:
    """The release, live for all clients. RolloutFailed with the reason when it was rolled back."""
    say = get_run_logger().info
    running = await _begin(serving, rollout, release, say)
    if running is None:
        return release
    decisions = await _follow(release, running, say)
    await _publish(release, decisions)
    return _outcome(release, decisions)


@task(
    task_run_name="begin_rollout {release.name}",
    retries=3,
    retry_delay_seconds=2,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def begin_rollout(serving: ServingSpec, rollout: RolloutSpec, release: Release) -> str | None:
    """The rollout of the release that runs now, begun if there was none. None: the release is live already."""
    return await _begin(serving, rollout, release, get_run_logger().info)


@task(task_run_name="follow_rollout {release.name}", cache_policy=NO_CACHE)
async def follow_rollout(release: Release, rollout: str) -> str | None:
    """What a person is asked, once the rollout waits for approval; None once it has ended well."""
    decisions = await _follow(release, rollout, get_run_logger().info, until_asked=True)
    await _publish(release, decisions)
    if decisions[-1].state.get("hold") == Hold.APPROVAL:
        return decisions[-1].reason
    _outcome(release, decisions)
    return None


@task(task_run_name="answer_rollout {release.name}", cache_policy=NO_CACHE)
async def answer_rollout(release: Release, rollout: str, answer: Approval) -> None:
    """Tells the controller what a person said. Nothing, when somebody has said it elsewhere meanwhile."""
    status = model_status(environment.home(), release.model)
    if status is None or status.rollout.id != rollout or status.rollout.hold != Hold.APPROVAL:
        get_run_logger().info("the rollout does not wait for approval any more")
        return
    kind: Kind = "approve" if answer.approve else "abort"
    command = Command(kind=kind, model=release.model, by=_who(), why=answer.why)
    said = await asyncio.to_thread(ask, environment.home(), command)
    if not said.accepted:
        raise RolloutRefused(model=release.model, command=kind, reason=said.reason)


async def _begin(serving: ServingSpec, rollout: RolloutSpec, release: Release, say: Say) -> str | None:
    status = model_status(environment.home(), release.model)
    if status is not None and status.live == release.version and not status.rollout.running:
        say(f"{release.name} is live already")
        return None
    if status is not None and status.rollout.running and status.rollout.version == release.version:
        say(f"the rollout of {release.name} is under way; following it")
        return status.rollout.id
    plan = Plan.from_spec(rollout, serving)
    running = await asyncio.to_thread(_start, release, plan)
    say(f"the controller has accepted {release.name}")
    return running


async def _publish(release: Release, decisions: list[Decision]) -> None:
    await acreate_markdown_artifact(
        key=f"{release.model}-rollout",
        markdown=_page(release, decisions),
        description=f"How {release.name} was rolled out",
    )


def _start(release: Release, plan: Plan) -> str:
    """The id of the rollout that was begun."""
    command = Command(
        kind="start",
        model=release.model,
        version=release.version,
        by=_who(),
        plan=plan,
    )
    answer = ask(environment.home(), command)
    if not answer.accepted or answer.rollout is None:
        raise RolloutRefused(model=release.model, command=command.kind, reason=answer.reason)
    return answer.rollout


def _who() -> str:
    return f"{environment.user()} (flow run {flow_run.name})"


async def _follow(release: Release, rollout: str, say: Say, *, until_asked: bool = False) -> list[Decision]:
    """Every decision, once the last one is made; with what the release's Triton has to say meanwhile."""
    log = environment.home() / "releases" / "logs" / f"{release.name}.log"
    find, label = lambda: [log] if log.exists() else [], triton_line(release.name)
    with thinned(say) as less, following(find, less, label=label):
        return await _follow_decisions(release, rollout, say, until_asked=until_asked)


async def _follow_decisions(release: Release, rollout: str, say: Say, *, until_asked: bool) -> list[Decision]:
    """Every decision, once the last one is made, or once the plan could not have lasted so long by itself."""
    shown, began = 0, time.monotonic()
    journal = reader(environment.home(), release.model, rollout)
    while True:
        decisions = await asyncio.to_thread(journal.decisions)
        for decision in decisions[shown:]:
            say(f"{release.name}: {describe(decision)}")
            _emit(release, decision)
        shown = len(decisions)
        if decisions and Phase(decisions[-1].phase).final:
            return decisions
        if until_asked and decisions and decisions[-1].state.get("hold") == Hold.APPROVAL:
            return decisions
        if decisions and time.monotonic() - began > _longest_s(Plan.from_json(decisions[0].state["plan"])):
            return decisions
        await asyncio.sleep(_POLL_S)


def _emit(release: Release, decision: Decision) -> None:
    """For automations of the Prefect server: one event for each decision, named by the phase."""
    emit_event(
        event=f"serin.rollout.{decision.phase}",
        resource={
            "prefect.resource.id": f"serin.model.{release.model}",
            "prefect.resource.name": release.name,
        },
        payload={"weight_percent": decision.weight, "verdict": decision.verdict, "reason": decision.reason},
    )


def _longest_s(plan: Plan) -> float:
    steps_s = (len(plan.steps) - 1) * max(plan.deadline_s, plan.step_s)
    return plan.load_s + steps_s + plan.bake_s + plan.drain_s + 60.0


def _outcome(release: Release, decisions: list[Decision]) -> Release:
    last = decisions[-1]
    if last.phase == Phase.PROMOTED:
        return release
    if last.phase == Phase.ROLLED_BACK:
        turned = next((found for found in decisions if found.phase == Phase.ABORTING), last)
        raise RolloutFailed(release=release.name, model=release.model, reason=turned.reason)
    raise RolloutUnfinished(release=release.name, phase=describe(last))


def describe(decision: Decision) -> str:
    """One decision in a line."""
    share = f" at {decision.weight:g}%" if decision.phase == Phase.SHIFTING else ""
    held = f", held ({decision.state['hold']})" if decision.state.get("hold") else ""
    return f"{decision.phase}{share}{held}: {decision.reason}"


def _page(release: Release, decisions: list[Decision]) -> str:
    rows = [
        (
            f"{datetime.fromtimestamp(decision.t, UTC):%H:%M:%S}",
            decision.phase,
            f"{decision.weight:g}%",
            decision.state.get("hold") or "",
            decision.verdict or "",
            decision.reason,
            decision.by,
        )
        for decision in tell(decisions).decisions
    ]
    story = table(("UTC", "phase", "traffic", "held", "verdict", "reason", "by"), rows)
    began = decisions[0].t
    traffic = curves(
        {"traffic of the new version, %": [(d.t - began, d.weight) for d in decisions]}, "seconds"
    )
    evidence = drawing(evidence_drawing(tell(decisions)), "Evidence against the candidate")
    return f"# Rollout of {release.name}\n\n{drawing(traffic, 'Traffic')}\n{evidence}\n{story}"
