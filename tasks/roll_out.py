"""Prefect's tasks for rollouts, and the page and the events about their decisions."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.runtime import flow_run

from serin.formats.serving.journal import Decision
from serin.machine import environment
from serin.pipeline import roll_out as use_case
from serin.reports.charts import curves
from serin.reports.rollout_page import evidence_drawing
from serin.rollout.run.story import tell
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Release
from tasks.approval import Approval
from tasks.in_thread import in_thread
from tasks.markdown import drawing, table
from tasks.retry import error_is_retryable
from tasks.run_log import run_log


@task(
    task_run_name="roll_out_release {release.name}",
    retries=3,
    retry_delay_seconds=2,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def roll_out_release(spec: PipelineSpec, release: Release) -> Release:
    """Makes the release live for all clients. Raises RolloutFailed with the reason when it was rolled back."""
    with run_log():
        running = await asyncio.to_thread(use_case.begin_rollout, spec, release, by=_who())
    return release if running is None else use_case.rollout_outcome(release, await _follow(release, running))


@task(
    task_run_name="begin_rollout {release.name}",
    retries=3,
    retry_delay_seconds=2,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def begin_rollout(spec: PipelineSpec, release: Release) -> str | None:
    """Returns the running rollout of the release, starting it if there is none. None: the release is already live."""
    with run_log():
        return await asyncio.to_thread(use_case.begin_rollout, spec, release, by=_who())


@task(task_run_name="follow_rollout {release.name}", cache_policy=NO_CACHE)
async def follow_rollout(release: Release, rollout: str) -> str | None:
    """Returns the question for a person once the rollout waits for approval; None once it has succeeded."""
    decisions = await _follow(release, rollout, until_asked=True)
    if use_case.waits_for_approval(decisions):
        return decisions[-1].reason
    use_case.rollout_outcome(release, decisions)
    return None


@task(task_run_name="answer_rollout {release.name}", cache_policy=NO_CACHE)
async def answer_rollout(release: Release, rollout: str, answer: Approval) -> None:
    """Sends a person's decision to the controller; nothing if it was made elsewhere in the meantime."""
    with run_log():
        await asyncio.to_thread(
            use_case.answer_rollout, release, rollout, approve=answer.approve, why=answer.why, by=_who()
        )


async def _follow(release: Release, rollout: str, *, until_asked: bool = False) -> list[Decision]:
    """Emits every decision as a Prefect event, and updates the page about them."""
    decisions: list[Decision] = await in_thread(
        use_case.follow_rollout,
        release,
        rollout,
        on_decision=lambda decision: _emit(release, decision),
        until_asked=until_asked,
    )
    await acreate_markdown_artifact(
        key=f"{release.model}-rollout",
        markdown=_page(release, decisions),
        description=f"How {release.name} was rolled out",
    )
    return decisions


def _who() -> str:
    return f"{environment.actor()} (flow run {flow_run.name})"


def _emit(release: Release, decision: Decision) -> None:
    """Emits one event per decision, named by the phase, for automations of the Prefect server."""
    emit_event(
        event=f"serin.rollout.{decision.phase}",
        resource={
            "prefect.resource.id": f"serin.model.{release.model}",
            "prefect.resource.name": release.name,
        },
        payload={"weight_percent": decision.weight, "verdict": decision.verdict, "reason": decision.reason},
    )


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
    shares = [(d.t - began, d.weight) for d in decisions]
    traffic = curves({"traffic of the new version, %": shares}, "seconds").standalone()
    chart = evidence_drawing(tell(decisions))
    evidence = drawing(chart.standalone(), "Evidence against the candidate") if chart else ""
    return f"# Rollout of {release.name}\n\n{drawing(traffic, 'Traffic')}\n{evidence}\n{story}"
