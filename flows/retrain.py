"""Trains live models again: every night, and on events (deployments/prefect.yaml)."""

from __future__ import annotations

from typing import Literal

from prefect import flow

from serin.store.artifacts import Release
from tasks.outcome import outcome_as_state
from tasks.retrain import models_to_retrain, retrain_models


@flow(persist_result=True, result_serializer="json")
@outcome_as_state
async def retrain(
    why: Literal["asked", "nightly", "data", "drift"] = "asked", model: str | None = None
) -> list[Release]:
    """Retrains a live model (all of them when none is named) from its own spec and today's tables.

    The new version is rolled out unless it is worse. `why`: what happened. Only models whose `monitoring.retrain` names
    it are trained; `asked` trains every one.
    """
    return await retrain_models(models_to_retrain(why, model))
