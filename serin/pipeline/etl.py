"""Raw tables to a dataset: find the one made from the same tables by the same rules, or build it."""

from __future__ import annotations

import threading

from serin.errors import NotFound
from serin.machine import environment
from serin.pipeline.needs import etl_needs
from serin.pipeline.stage import StageCall, StageResult, dataset_here
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.spec.names import Priority
from serin.store.artifacts import NO_DATASET, Dataset
from serin.store.stage_keys import remember
from serin.store.stage_results import find_result, keep_result
from serin.store.store import Store
from serin.store.version_cost import keep_receipt


def build_dataset(
    data: DataSpec,
    features: tuple[FeatureSpec, ...],
    etl: EtlSpec,
    *,
    name: str,
    fresh: bool = False,
    attempt: str | None = None,
    run: str | None = None,
    priority: Priority = "normal",
    stop: threading.Event | None = None,
) -> StageResult[Dataset]:
    """The dataset that the sections describe, published in the store.

    `fresh`: build it although it is known; the same `attempt` then finds what it has built. `run`, `priority` and
    `stop`: see StageCall.
    """
    if not data.tables:
        return StageResult(value=NO_DATASET, ran=False, why="the spec has no data section")
    call = StageCall.of("etl", name, fresh=fresh, attempt=attempt, run=run, priority=priority, stop=stop)
    known = _find(call, data, features)
    if known is not None:
        return call.found(known, _describe(known))
    from serin.etl import build, identity  # pandas: not for a call that only looks

    files = identity.files_of(identity.find_sources(data, Store.open()))
    parts = identity.dataset_key(data, features, files)
    with call.lock(call.key(parts)) as waited:
        known = _find(call, data, features) if waited else None
        if known is not None:
            return call.found(known, _describe(known))
        why = call.begin(parts)
        with call.work(etl_needs(data, etl), call.key(parts)) as measurement:
            dataset = build.build_dataset(
                data, features, etl, store=Store.open(), name=name, fresh=call.attempt is not None
            )
            measurement.rows = sum(dataset.rows.values())
        keep_receipt(call.home, "etl", dataset.digest, measurement.receipt)
        remember(call.home, name, parts)
        if call.attempt is not None:
            keep_result(call.home, "etl", call.attempt, dataset)
    return StageResult(value=dataset, ran=True, why=why, receipt=measurement.receipt)


def find_dataset(data: DataSpec, features: tuple[FeatureSpec, ...]) -> Dataset | None:
    """The dataset that was made from the same files by the same rules, when there is one. It must still be fresh."""
    if not data.tables:
        return NO_DATASET
    from serin.etl import build

    return build.find_dataset(data, features, Store.open())


def _find(call: StageCall, data: DataSpec, features: tuple[FeatureSpec, ...]) -> Dataset | None:
    """A fresh try finds only what it has built itself, before it was interrupted."""
    if call.attempt is None:
        return find_dataset(data, features)
    found = find_result(environment.home(), "etl", call.attempt, Dataset)
    try:
        return None if found is None else dataset_here(found)
    except NotFound:
        return None


def _describe(dataset: Dataset) -> str:
    return f"made before: dataset {dataset.digest[:12]} in {dataset.path}"
