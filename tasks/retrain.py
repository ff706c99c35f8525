"""Finds the live models that are due for retraining, and runs their pipelines, each as a separate run."""

from __future__ import annotations

import asyncio

from prefect import get_run_logger

from serin.errors import SerinError
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Release
from tasks.place import run_stage
from tasks.versions import find_version, live_models


def models_to_retrain(why: str, model: str | None) -> list[PipelineSpec]:
    """Returns the specs of live models to retrain for this reason. A model that is named must have a live version."""
    specs = [find_version(name, "live")[1] for name in ([model] if model else live_models())]
    return [spec for spec in specs if why == "asked" or why in spec.monitoring.retrain]


async def retrain_models(specs: list[PipelineSpec]) -> list[Release]:
    """Retrains the models and returns the versions that are live then. All are tried; the first error is raised at the
    end."""
    if not specs:
        get_run_logger().info("no live model asks for this (monitoring.retrain of its spec)")
    whole = [spec.model_dump(mode="json", by_alias=True) for spec in specs]
    ended = await asyncio.gather(
        *(run_stage("pipeline", Release, spec=spec) for spec in whole), return_exceptions=True
    )
    errors = [end for end in ended if isinstance(end, BaseException)]
    for error in errors:
        if not isinstance(error, SerinError):
            raise error
        get_run_logger().error("%s", error)
    if errors:
        raise errors[0]
    return [end for end in ended if isinstance(end, Release)]
