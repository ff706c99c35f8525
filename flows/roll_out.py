"""Rolls out a published version."""

from __future__ import annotations

from prefect import flow
from prefect.flow_runs import apause_flow_run

from serin.store.artifacts import Release
from tasks.approval import Approval, until_answered_elsewhere
from tasks.outcome import outcome_as_state
from tasks.roll_out import answer_rollout, begin_rollout, follow_rollout
from tasks.versions import find_version

APPROVAL_S = 7 * 86400  # a run that waits longer fails; the rollout stays held, and a new run asks again
_POLL_S = 2


@flow(name="roll_out", persist_result=True, result_serializer="json")
@outcome_as_state
async def roll_out(model: str, version: int | None = None) -> Release:
    """Rolls out a version (the newest when none is named) as its own spec says, and follows it to the end."""
    release, spec = find_version(model, version)
    rollout = await begin_rollout(spec, release)
    while rollout and (question := await follow_rollout(release, rollout)):
        form = Approval.with_initial_data(description=question, approve=True, why="")
        async with until_answered_elsewhere(release, rollout, every_s=_POLL_S) as elsewhere:
            answer = await apause_flow_run(wait_for_input=form, timeout=APPROVAL_S, poll_interval=_POLL_S)
        if not elsewhere.is_set():
            await answer_rollout(release, rollout, answer)
    return release
