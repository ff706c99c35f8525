"""The whole pipeline in one process: the default on a laptop (`pipeline/inline`)."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.parameters import Spec, Stage
from serin.pipeline.open_spec import opened_spec
from serin.store.artifacts import Release
from tasks.etl import build_dataset
from tasks.export import export_model
from tasks.outcome import outcome_as_state
from tasks.roll_out import roll_out_release
from tasks.run_log import log_result
from tasks.tag import tag_with_model
from tasks.train import train_model
from tasks.versions import show_version


@flow(name="pipeline", persist_result=True, result_serializer="json")
@outcome_as_state
async def pipeline(
    spec: Spec,
    fresh: tuple[Stage, ...] = (),
    serve: bool = True,
    approved_by: str | None = None,
    reason: dict[str, Any] | None = None,
) -> Release:
    """From raw tables to a served, validated model version.

    `spec`: a package (`package:DIGEST`, what `serin run` sends), a URL, a path on the worker (relative to the
    application folder) or the spec itself, without relative paths. `fresh`: stages to run again although their
    result exists. `serve`: if false, the version is published and not rolled out. `approved_by`: the person who
    approves a version that is worse than the live one. `reason`: why the model is trained again (flow `retrain`).
    """
    with opened_spec(spec) as plan:
        await tag_with_model(plan.name)
        dataset = await build_dataset(
            plan.data,
            plan.features,
            plan.etl,
            name=plan.name,
            priority=plan.priority,
            fresh="etl" in fresh,
        )
        checkpoint = await train_model(
            plan.model,
            plan.training,
            dataset,
            name=plan.name,
            priority=plan.priority,
            fresh="train" in fresh,
        )
        bundle = await export_model(
            plan, checkpoint, dataset, fresh="export" in fresh, approved_by=approved_by, reason=reason
        )
    release = Release(model=bundle.model, version=bundle.version)
    await show_version(release)
    if serve:
        await roll_out_release(plan, release)
    log_result(release, served=serve)
    return release
