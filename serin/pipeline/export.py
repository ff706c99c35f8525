"""Trained weights to a published model version that has passed the gate: find it, or export it."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from serin.errors import BundleBroken, NotFound, NotTrained
from serin.formats.bundle import read_manifest
from serin.formats.reason import Reason
from serin.formats.trained import RECORD, read_record
from serin.machine import environment
from serin.machine.packages import entered
from serin.pipeline.needs import export_needs
from serin.pipeline.stage import StageCall, StageResult, checkpoint_here, dataset_here
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Dataset
from serin.store.stage_keys import StageKey, key_of, remember
from serin.store.stage_results import find_result, keep_result
from serin.store.store import Store
from serin.store.version_cost import keep_receipt
from serin.store.waits import importing
from serin.training.launch.run_dir import own_code


def export_model(
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    dataset: Dataset,
    *,
    approved_by: str | None = None,
    reason: Reason | None = None,
    fresh: bool = False,
    attempt: str | None = None,
    run: str | None = None,
    stop: threading.Event | None = None,
) -> StageResult[Bundle]:
    """A version of the model made of these weights.

    `approved_by`: the person who approves it although it is worse than the live version. `reason`: why it was trained
    again, which the version's lineage keeps. `fresh`: publish another version although one is known; the same `attempt`
    then finds what it has published. All calls of one `attempt`, on whatever host, publish one version at most. `run`
    and `stop`: see StageCall.
    """
    call = StageCall.of(
        "export", spec.name, fresh=fresh, attempt=attempt, run=run, priority=spec.priority, stop=stop
    )
    dataset, weights = dataset_here(dataset), checkpoint_here(checkpoint)
    if weights is None:
        raise NotTrained(spec=spec.name)
    checkpoint = weights
    parts = export_parts(spec, checkpoint, dataset)
    key = call.key(parts)
    with call.lock(key):
        known = _find(spec.name, key)
        if known is not None:
            return call.found(known, f"exported before: {known.model} version {known.version}")
        why = call.begin(parts)
        with call.work(export_needs(spec), key) as measurement:
            claim = None if attempt is None else hashlib.sha256(f"{key} {attempt}".encode()).hexdigest()
            bundle = _export(call, spec, checkpoint, dataset, key, approved_by, reason, claim)
        keep_receipt(call.home, "export", f"{bundle.model}-v{bundle.version}", measurement.receipt)
        keep_result(call.home, "export", key, bundle)
        keep_result(call.home, "export", parts.digest, bundle)  # found by a call that is not fresh
        remember(call.home, spec.name, parts)
        call.note(ran=True, reason=why, value=bundle)
    return StageResult(value=bundle, ran=True, why=why, receipt=measurement.receipt)


def find_bundle(spec: PipelineSpec, checkpoint: Checkpoint, dataset: Dataset) -> Bundle | None:
    """The version that was exported from the same weights for the same spec, when the store still has it."""
    weights = checkpoint_here(checkpoint)
    if weights is None:
        return None
    return _find(spec.name, export_parts(spec, weights, dataset_here(dataset)).digest)


def export_parts(spec: PipelineSpec, checkpoint: Checkpoint, dataset: Dataset) -> StageKey:
    """What decides a version. It holds its whole spec, by which it is rolled out, watched and trained again, so all of
    it counts but the search and the priority. The code of a network that a script left is not that of the spec's
    model."""
    record = (Path(checkpoint.path) / RECORD).read_bytes()  # holds the digest of the weights
    trained = read_record(checkpoint.path).model
    operators = json.dumps([feature.operators for feature in spec.features if feature.operators])
    environment_part = {} if spec.environment is None else {"environment": spec.environment.digest()}
    return key_of(
        "export", name=spec.name, data=spec.data, features=spec.features, etl=spec.etl,
        model=spec.model.without_folders(),
        training=spec.training, export=spec.export, champion=spec.champion, serving=spec.serving,
        rollout=spec.rollout, monitoring=spec.monitoring, objectives=spec.objectives,
        dataset=f"{dataset.digest} {dataset.edition}",
        weights=hashlib.sha256(record).hexdigest(), operators=operators,
        own_code=f"{own_code(spec.model)} {own_code(trained)}",
        **environment_part,
    )  # fmt: skip


def _export(
    call: StageCall,
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    dataset: Dataset,
    key: str,
    approved_by: str | None,
    reason: Reason | None,
    claim: str | None,
) -> Bundle:
    with importing("imports of ONNX for export"):
        from serin.etl.raw_rows import read_test_rows, read_training_rows
        from serin.export import build  # not for a call that only looks

    lineage: dict[str, Any] = {"training": Path(checkpoint.path).parent.name, "export": key}
    if (package := environment.text("SERIN_PACKAGE")) is not None:
        lineage["package"] = package
    if reason is not None:
        lineage = {"reason": reason.to_json(), **lineage}
    if (packages := entered()) is not None:
        lineage["environment"] = packages.spec.image or ", ".join(packages.packages)
    store = Store.open()
    try:
        return build.export_model(
            spec,
            checkpoint,
            dataset,
            store=store,
            lineage=lineage if call.run is None else {"flow_run": call.run, **lineage},
            read_rows=lambda features, most: read_test_rows(spec.data, features, dataset, max_rows=most),
            read_training=lambda most: read_training_rows(spec.data, spec.features, dataset, max_rows=most),
            approved_by=approved_by,
            claim=claim,
        )
    except BundleBroken:
        number = None if claim is None else store.reserve_version(spec.name, claim=claim)
        if number is None or number not in store.versions(spec.name):
            raise
        call.log(f"another host has published {spec.name} version {number} of the same run")
        return store.bundle(spec.name, number, hold=True)


def _find(model: str, key: str) -> Bundle | None:
    found = find_result(environment.home(), "export", key, Bundle)
    if found is None:
        return _published_and_not_kept(model, key)
    try:
        present = Store.open().bundle(found.model, found.version, hold=True)
    except NotFound:
        return None
    return present if present.digest == found.digest and _met_the_live_one(present) else None


def _published_and_not_kept(model: str, key: str) -> Bundle | None:
    """The newest version, when it is what this export gives: the process that published it died before it kept the
    result."""
    versions = Store.open().versions(model)
    newest = Store.open().bundle(model, versions[-1], hold=True) if versions else None
    if newest is None or read_manifest(Path(newest.path)).lineage.get("export") != key:
        return None
    return newest if _met_the_live_one(newest) else None


def _met_the_live_one(bundle: Bundle) -> bool:
    """Whether the version is live itself, or was compared with the one that is live now."""
    live = Store.open().aliases(bundle.model).get("live")
    report = Path(bundle.path) / "champion.json"
    met = json.loads(report.read_text(encoding="utf-8")).get("live_version") if report.is_file() else None
    return live in (met, bundle.version)
