"""Searches for better settings of a pipeline."""

from __future__ import annotations

from prefect import flow

from flows.parameters import Spec
from serin.pipeline.open_spec import opened_spec
from serin.spec.load import load_search_spec
from serin.training.search.search import SearchResult
from tasks.etl import build_dataset
from tasks.outcome import outcome_as_state
from tasks.search import search_settings
from tasks.tag import tag_with_model


@flow(name="search", persist_result=True, result_serializer="json")
@outcome_as_state
async def search(spec: Spec) -> SearchResult:
    """Tries the settings that `search.space` of the spec allows; the spec with the best ones is in the result's
    folder."""
    with opened_spec(spec) as opened:
        plan = load_search_spec(opened)
        await tag_with_model(plan.name)
        datasets = [
            await build_dataset(data, plan.features, plan.etl, name=plan.name, priority=plan.priority)
            for data in plan.fold_data()
        ]
        return await search_settings(plan, datasets)
