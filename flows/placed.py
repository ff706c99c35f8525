"""The whole pipeline with each stage on a suitable machine (`pipeline/placed`).

This parent only looks for results and waits: a stage whose result exists needs no machine.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.parameters import Spec, Stage
from serin.pipeline.etl import find_dataset
from serin.pipeline.export import find_bundle
from serin.pipeline.needs import (
    Needs,
    etl_deployment,
    etl_needs,
    export_deployment,
    export_needs,
    job_variables,
    train_needs,
)
from serin.pipeline.open_spec import opened_spec, sent_spec
from serin.pipeline.train import find_checkpoint
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Dataset, Release
from serin.training.launch.machines import machines_told
from tasks.outcome import outcome_as_state
from tasks.place import found_before, run_stage
from tasks.roll_out import roll_out_release
from tasks.run_log import log_result
from tasks.tag import tag_with_model
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
    """From raw tables to a served, validated model version. The parameters are those of `pipeline/inline`."""
    with opened_spec(spec) as plan:
        await tag_with_model(plan.name)
        shared: dict[str, Any] = {"spec": sent_spec(spec, plan), "attempt": str(flow_run.id)}
        dataset = await _dataset(plan, "etl" in fresh, shared)
        checkpoint = None if "train" in fresh else find_checkpoint(plan.model, plan.training, dataset)
        needs: Needs | None = None
        if checkpoint is None:
            # The needs of the export are found in the meantime: that may import ONNX Runtime.
            trained, needs = await asyncio.gather(
                _train(plan, dataset, "train" in fresh, shared), asyncio.to_thread(export_needs, plan)
            )
            checkpoint = trained
        else:
            found_before("train", checkpoint.path)
        bundle = None if "export" in fresh else find_bundle(plan, checkpoint, dataset)
        if bundle is None:
            asked = {"fresh": "export" in fresh, "approved_by": approved_by, "reason": reason, **shared}
            bundle = await _export(plan, needs or export_needs(plan), checkpoint, dataset, asked)
        else:
            found_before("export", f"{bundle.model} version {bundle.version}")
    release = Release(model=bundle.model, version=bundle.version)
    await show_version(release)
    if serve:
        await roll_out_release(plan, release)
    log_result(release, served=serve)
    return release


async def _dataset(plan: PipelineSpec, fresh: bool, shared: dict[str, Any]) -> Dataset:
    dataset = None if fresh else find_dataset(plan.data, plan.features)
    if dataset is not None:
        found_before("etl", dataset.digest[:12])
        return dataset
    needs = etl_needs(plan.data, plan.etl)
    made: Dataset = await run_stage(
        "etl",
        Dataset,
        deployment=etl_deployment(plan, needs),
        needs=str(needs),
        job_variables=job_variables("etl", plan),
        fresh=fresh,
        **shared,
    )
    return made


async def _train(plan: PipelineSpec, dataset: Dataset, fresh: bool, shared: dict[str, Any]) -> Checkpoint:
    """Trains on one host, or on as many as SERIN_MACHINES says: a run for each, which meet in the store."""
    machines = machines_told()
    common: dict[str, Any] = {**shared, "dataset": dataset, "fresh": fresh}
    parts = [{**common, "part": number} for number in range(machines.count)]
    needs, variables = str(train_needs(plan.model, plan.training)), job_variables("train", plan)
    made: list[Checkpoint] = await asyncio.gather(
        *(
            run_stage("train", Checkpoint, needs=needs, job_variables=variables, **part)
            for part in (parts if machines.in_store else [common])
        )
    )
    return made[0]


async def _export(
    plan: PipelineSpec, needs: Needs, checkpoint: Checkpoint, dataset: Dataset, asked: dict[str, Any]
) -> Bundle:
    made: Bundle = await run_stage(
        "export",
        Bundle,
        deployment=export_deployment(plan, needs),
        needs=str(needs),
        job_variables=job_variables("export", plan),
        checkpoint=checkpoint,
        dataset=dataset,
        **asked,
    )
    return made
