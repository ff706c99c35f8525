"""Runs a stage where Prefect places it, and returns its result: paths and numbers, as JSON.

The stage's run has a name derived from its request, so that a pipeline that was killed and resumed finds the run it
began instead of starting another. No wait is unbounded: a run without a sign of life is abandoned.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import get_client, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentFlowRunCreate
from prefect.client.schemas.objects import FlowRun, State
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.exceptions import MissingResult, PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.states import Cancelling, Crashed, Pending, Scheduled, to_state_create
from pydantic import TypeAdapter

from serin.errors import SerinError, StageFailed, StageLost, StoreError
from serin.machine import environment
from serin.pipeline.silence import RunHost
from serin.store.stage_keys import note, notes
from serin.store.stage_results import read_outcome
from tasks.run_end import listening_for_end
from tasks.waits import note_stage_waits

Result = TypeVar("Result")

_TRIES, _AGAIN_S = 3, 2.0
_POLL_S = (0.1, 2.0)  # a fiftieth of the time waited, within these; the longest while events arrive
_LOOK_S = 15.0
_SILENT_S = 600.0  # three heartbeats that Prefect sends for a run
_NO_WORKER_S = 600.0  # without a sign of life from a worker of the pool
_SERVER_GONE_S = 600.0


@task(name="place", cache_policy=NO_CACHE)
async def _placed() -> None:
    """Stands for a placed stage in the pipeline's graph; it is not called, its state is that of the stage's run."""


async def run_stage(
    stage: str,
    kind: type[Result],
    *,
    deployment: str = "placed",
    needs: str = "",
    job_variables: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> Result:
    """Returns the result of `<stage>/<deployment>` for `parameters`. A run that was lost, not failed, is run again.

    `needs`: the stage's needs as text, for people who look at the placement. `job_variables`: what it asks of its work
    pool.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            return await _run_once(stage, kind, deployment, needs, job_variables, parameters)
        except SerinError as error:
            if not (error.retryable and tries_left):
                raise
            get_run_logger().warning("%s; trying again in %g s", error, _AGAIN_S)
            await asyncio.sleep(_AGAIN_S)
    raise AssertionError("the last try returns or raises")


async def _run_once(
    stage: str,
    kind: type[Result],
    deployment: str,
    needs: str,
    job_variables: Mapping[str, Any] | None,
    parameters: Mapping[str, Any],
) -> Result:
    plain = {name: _plain(value) for name, value in parameters.items()}
    where = f"placed as {stage}/{deployment}{f', needs {needs}' if needs else ''}"
    get_run_logger().info("%s %s", stage, where)
    note(environment.home(), str(flow_run.id), stage, ran=True, why=where)
    asked = time.time()
    try:
        async with get_client() as client:
            run = await _begin(client, stage, deployment, plain, job_variables)
            run = await _ended(client, stage, run)
            noticed, states = time.time(), await client.read_flow_run_states(run.id)
    except asyncio.CancelledError:
        await _pass_on_the_cancelling(stage, deployment, plain, job_variables)
        raise
    state = run.state
    assert state is not None
    if state.is_crashed():
        raise StageLost(stage=stage, run=run.name, reason=state.message or "it disappeared without a message")
    if not state.is_completed():
        raise StageFailed(stage=stage, run=run.name, reason=state.message or f"it ended as {state.name}")
    get_run_logger().info("%s done by run %r", stage, run.name)
    outcome = await asyncio.to_thread(read_outcome, str(run.id))
    _note(run, notes(environment.home(), str(run.id)) if outcome is None else outcome.notes)
    note_stage_waits(stage, run, states, asked=asked, noticed=noticed)
    if outcome is not None:
        return TypeAdapter(kind).validate_python(outcome.value)
    try:
        return TypeAdapter(kind).validate_python(await state.aresult())
    except MissingResult as error:
        await _give_up(run, "its result is gone")
        raise StageLost(stage=stage, run=run.name, reason="its result is gone") from error


def _note(run: FlowRun, found: Sequence[dict[str, Any]]) -> None:
    """Notes in this run what was noted in the stage's."""
    for entry in found:
        version = entry.get("version")
        note(
            environment.home(),
            str(flow_run.id),
            entry["stage"],
            ran=entry["ran"],
            why=f"by run {run.name!r}: {entry['why']}",
            version=None if version is None else (version[0], version[1]),
            receipt=entry.get("receipt"),
            environment=entry.get("environment"),
        )


async def _pass_on_the_cancelling(
    stage: str, deployment: str, parameters: dict[str, Any], job_variables: Mapping[str, Any] | None
) -> None:
    """Cancels the placed stage of a cancelled pipeline.

    A pipeline that only lost its own process (it was killed, or its machine was needed) leaves the stage alone, to find
    it again when it resumes.
    """
    async with get_client() as client:
        own = (await client.read_flow_run(UUID(str(flow_run.id)))).state
        if own is None or not (own.is_cancelling() or own.is_cancelled()):
            return
        run = await _begin(
            client, stage, deployment, parameters, job_variables
        )  # the same, whatever its state
        if run.state is None or not run.state.is_final():
            why: State[Any] = Cancelling(message="the pipeline that requested it was cancelled")
            await client.set_flow_run_state(run.id, why)


async def _give_up(run: FlowRun, reason: str) -> None:
    """Marks a run as lost, so that the next try starts another."""
    async with get_client() as client:
        await client.set_flow_run_state(run.id, Crashed(message=reason), force=True)


async def _begin(
    client: PrefectClient,
    stage: str,
    deployment: str,
    parameters: dict[str, Any],
    job_variables: Mapping[str, Any] | None,
) -> FlowRun:
    """Returns the run that this pipeline began for the same request and that has not failed; else a new one."""
    name = f"{stage}/{deployment}"
    asked = json.dumps([name, parameters], sort_keys=True)
    base = f"{flow_run.id}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
    for number in itertools.count():
        asked_for = (name, parameters, f"{base}-{number}", dict(job_variables or {}))
        run = await request_run(client, *asked_for)
        if run.state is None or not run.state.is_final() or run.state.is_completed():
            return run
    raise AssertionError("there are more numbers than runs")


async def request_run(
    client: PrefectClient,
    deployment: str,
    parameters: dict[str, Any],
    key: str,
    job_variables: dict[str, Any],
) -> FlowRun:
    """Returns the run of a deployment with this key, a new one if there is none, as a subflow of the current run.

    Prefect's `arun_deployment` does the same and records one more task. The server does not check the parameters, which
    a flow has made: on SQLite its write is refused when another one comes while it checks them.
    """
    found, above = await asyncio.gather(
        client.read_deployment_by_name(deployment),
        client.create_task_run(
            _placed,
            UUID(str(flow_run.id)),
            key,
            name=f"place {deployment.partition('/')[0]}",
            state=Pending(),
        ),
    )
    wanted = DeploymentFlowRunCreate(
        parameters=parameters,
        state=to_state_create(Scheduled()),
        idempotency_key=key,
        parent_task_run_id=above.id,
        job_variables=job_variables,
        tags=list(flow_run.tags),  # the model's among them
        enforce_parameter_schema=False,
    )
    response = await client.request(
        "POST",
        "/deployments/{id}/create_flow_run",
        path_params={"id": found.id},
        json=wanted.model_dump(mode="json", exclude_unset=True),
    )
    return FlowRun.model_validate(response.json())


async def _ended(client: PrefectClient, stage: str, run: FlowRun) -> FlowRun:
    """Returns the run once it has ended; raises StageLost when no result can be expected any more."""
    began = heard = look_at = time.monotonic()
    host = RunHost(str(run.id))
    async with listening_for_end(run.id) as end:
        while True:
            try:
                run = await client.read_flow_run(run.id)
                heard = time.monotonic()
                if run.state is not None and run.state.is_final():
                    return run
                reason = await _why_hopeless(client, run, host) if heard >= look_at else None
            except (httpx.TransportError, PrefectHTTPStatusError) as error:  # it is being restarted
                if time.monotonic() - heard > _SERVER_GONE_S:
                    raise StageLost(
                        stage=stage, run=run.name, reason=f"the Prefect server is gone: {error}"
                    ) from error
                reason = None
            if reason is not None:
                await _give_up(run, reason)
                raise StageLost(stage=stage, run=run.name, reason=reason)
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_S
            asking_s = min(max((time.monotonic() - began) / 50, _POLL_S[0]), _POLL_S[1])
            await end.wait(asking_s=asking_s, listening_s=_POLL_S[1])


async def _why_hopeless(client: PrefectClient, run: FlowRun, host: RunHost) -> str | None:
    """Returns why no result can be expected from a run; None while it can. On the own stack the reconciler is
    faster."""
    state, now = run.state, datetime.now(UTC)
    if state is None or state.is_paused():
        return None
    silent = now - timedelta(seconds=_SILENT_S)
    lost = await asyncio.to_thread(_silent_host, host)
    if lost is not None:
        return f"its host {lost!r} is silent"
    if state.is_running():
        if state.timestamp > silent or await _heard_since(client, run, silent):
            return None
        return f"no sign of life for {_SILENT_S:.0f} s"
    waits_since = max(filter(None, (run.expected_start_time, state.timestamp)))
    if waits_since > now - timedelta(seconds=_NO_WORKER_S) or not run.work_pool_name:
        return None
    workers = await client.read_workers_for_work_pool(run.work_pool_name)
    seen = [worker.last_heartbeat_time for worker in workers if worker.last_heartbeat_time]
    if seen and max(seen) > now - timedelta(seconds=_NO_WORKER_S):
        return None
    return f"no worker of the pool {run.work_pool_name!r} for {_NO_WORKER_S:.0f} s"


def _silent_host(host: RunHost) -> str | None:
    try:
        return host.silent()
    except StoreError:  # it may be this host that cannot reach the store
        return None


async def _heard_since(client: PrefectClient, run: FlowRun, since: datetime) -> bool:
    wanted = EventFilter(
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        occurred=EventOccurredFilter.model_validate({"since": since}),
    )
    return bool((await client.read_events(wanted, limit=1)).events)


def found_before(stage: str, what: str) -> None:
    """Logs in this run that a stage needed no machine, and why."""
    reason = f"done before: {what}"
    get_run_logger().info("%s %s", stage, reason)
    note(environment.home(), str(flow_run.id), stage, ran=False, why=reason)


def _plain(value: Any) -> Any:
    return (
        dataclasses.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else value
    )
