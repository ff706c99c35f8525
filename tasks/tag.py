"""Tags the current run with its model."""

from __future__ import annotations

from uuid import UUID

from prefect import get_client
from prefect.runtime import flow_run


async def tag_with_model(model: str) -> None:
    """Adds the model's name to the tags of the run, so that a model's runs can be found. `serin run` does it when it
    starts a run; those of schedules, of retraining and of Prefect's page begin with the tags of their deployment.
    Stages that are placed from now on have the same tags."""
    tags: list[str] = flow_run.tags
    if model not in tags:
        tags.append(model)
        async with get_client() as client:
            await client.update_flow_run(UUID(str(flow_run.id)), tags=tags)
