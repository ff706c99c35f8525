"""Each stage as a separate flow, so that Prefect can place it on a suitable machine."""

from __future__ import annotations

from typing import Any

from prefect import flow

from serin.pipeline.open_spec import opened_spec
from serin.store.artifacts import Bundle, Checkpoint, Dataset
from tasks.etl import build_dataset
from tasks.export import export_model
from tasks.outcome import outcome_as_state
from tasks.share import shared_with_other_hosts
from tasks.train import train_model


@flow(persist_result=True, result_serializer="json")
@outcome_as_state
@shared_with_other_hosts
async def etl(spec: str | dict[str, Any], fresh: bool = False, attempt: str | None = None) -> Dataset:
    """Builds and publishes a dataset from raw tables. `attempt`: what a fresh build belongs to, when not to this run
    alone."""
    with opened_spec(spec) as plan:
        return await build_dataset(
            plan.data,
            plan.features,
            plan.etl,
            name=plan.name,
            priority=plan.priority,
            fresh=fresh,
            attempt=attempt,
        )


@flow(persist_result=True, result_serializer="json")
@outcome_as_state
@shared_with_other_hosts
async def train(
    spec: str | dict[str, Any],
    dataset: Dataset,
    fresh: bool = False,
    attempt: str | None = None,
    part: int = 0,  # noqa: ARG001 (Prefect starts a run for each)
) -> Checkpoint:
    """Trains weights on a dataset. `attempt`: what a fresh training belongs to, when not to this run alone. `part`: its
    number among the hosts that train together."""
    with opened_spec(spec) as plan:
        return await train_model(
            plan.model,
            plan.training,
            dataset,
            name=plan.name,
            priority=plan.priority,
            fresh=fresh,
            attempt=attempt,
        )


@flow(persist_result=True, result_serializer="json")
@outcome_as_state
@shared_with_other_hosts
async def export(
    spec: str | dict[str, Any],
    checkpoint: Checkpoint,
    dataset: Dataset,
    fresh: bool = False,
    attempt: str | None = None,
    approved_by: str | None = None,
    reason: dict[str, Any] | None = None,
) -> Bundle:
    """Exports trained weights to a validated and published model version, unless it is worse than the live one."""
    with opened_spec(spec) as plan:
        return await export_model(
            plan, checkpoint, dataset, fresh=fresh, attempt=attempt, approved_by=approved_by, reason=reason
        )
