"""Trains live models again: every night, and on events (deployments/prefect.yaml)."""

from __future__ import annotations

from typing import Any

from prefect import flow

from serin.formats.reason import Kind
from serin.store.artifacts import Release
from tasks.outcome import outcome_as_state
from tasks.retrain import models_to_retrain, retrain_models


@flow(persist_result=True, result_serializer="json")
@outcome_as_state
async def retrain(
    why: Kind = "asked", model: str | None = None, reason: dict[str, Any] | None = None
) -> list[Release]:
    """Retrains a live model (all of them when none is named) from its own spec and today's tables.

    The new version is rolled out unless it is worse. `why`: what happened. Only models whose `monitoring.retrain` names
    it are trained, and no more often than `monitoring.retrain_budget` allows; `asked` trains every one. `reason`: the
    payload of the event: `text`, `since`, `noticed`, `release`, `facts`.
    """
    return await retrain_models(models_to_retrain(why, model, reason))
