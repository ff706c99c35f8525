"""Run a stage where Prefect places it, and get its result: paths and numbers, as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.deployments import arun_deployment
from pydantic import TypeAdapter

from serin.errors import StageFailed, StageLost
from tasks.retry import error_is_retryable

Result = TypeVar("Result")

_POLL_S = 1.0


@task(
    task_run_name="place {stage}",
    retries=2,
    retry_delay_seconds=2,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def run_stage(stage: str, kind: type[Result], **parameters: Any) -> Result:
    """What the deployment `<stage>/placed` gives for `parameters`. A run that was lost, not failed, is run again."""
    plain = {name: _plain(value) for name, value in parameters.items()}
    run = await arun_deployment(f"{stage}/placed", parameters=plain, poll_interval=_POLL_S)
    state = run.state
    assert state is not None
    assert state.is_final()
    if state.is_crashed():
        raise StageLost(stage=stage, run=run.name, reason=state.message or "no word of it")
    if not state.is_completed():
        raise StageFailed(stage=stage, run=run.name, reason=state.message or f"it ended as {state.name}")
    get_run_logger().info("%s done by run %r", stage, run.name)
    return TypeAdapter(kind).validate_python(await state.aresult())


def _plain(value: Any) -> Any:
    return (
        dataclasses.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else value
    )
