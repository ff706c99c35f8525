"""Trained weights to a published model version that has passed the gate."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from serin.errors import NotFound
from serin.formats.bundle import read_manifest
from serin.formats.trained import RECORD, read_record
from serin.machine import environment
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Dataset
from serin.store.receipt import Receipt, measure
from serin.store.runs import hold_run_of
from serin.store.stage_keys import StageKey, key_of, note, remember, why
from serin.store.stage_results import find_result, keep_result, one_at_a_time
from serin.store.store import Store
from serin.training.launch.run_dir import edition_of, own_code
from tasks.markdown import drawing, receipt_table, table
from tasks.needs import export_needs, leased
from tasks.pictures import bars
from tasks.retry import error_is_retryable
from tasks.run_log import until_stopped

Say = Callable[[str], None]

_FORMAT = 1  # raise it when the same inputs must give another result


@task(
    task_run_name="export_model {spec.name}",
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def export_model(
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    dataset: Dataset,
    *,
    fresh: bool = False,
    attempt: str | None = None,
    override: str | None = None,
) -> Bundle:
    """A version of the model; the one that was made of the same weights before, unless `fresh`: then the one that the
    same `attempt` (this run, when none is named) has made.

    `override`: who answers for publishing it although it is worse than the live version."""
    lineage = {"flow_run": str(flow_run.id), "training": Path(checkpoint.path).parent.name}
    apart = (attempt or str(flow_run.id)) if fresh else None
    stop = threading.Event()
    say = until_stopped(get_run_logger().info, stop, stage="export")
    try:
        bundle, page = await asyncio.to_thread(
            _export, spec, checkpoint, dataset, apart, override, lineage, stop, say
        )
    finally:
        stop.set()  # when this run is cancelled; after its end it means nothing
    if page is not None:
        await acreate_markdown_artifact(
            key=f"{spec.name}-gate",
            markdown=page,
            description=f"What version {bundle.version} of {spec.name} proved before it was published",
        )
    return bundle


def _export(
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    dataset: Dataset,
    attempt: str | None,
    override: str | None,
    lineage: dict[str, str],
    stop: threading.Event,
    say: Say,
) -> tuple[Bundle, str | None]:
    """The version, and a page about it when it is new."""
    home, parts, run = environment.home(), export_parts(spec, checkpoint, dataset), lineage["flow_run"]
    key = _name(parts, attempt)
    Store.open().hold_dataset(dataset)
    hold_run_of(home, Path(checkpoint.path))
    with one_at_a_time(home, "export", key, stop=stop, say=say):
        found = find_bundle(spec, checkpoint, dataset, attempt=attempt)
        if found is not None:
            reason = f"exported before: {found.model} version {found.version}"
            say(reason)
            note(home, run, "export", ran=False, why=reason)
            return found, None
        reason = why(home, spec.name, parts, fresh=attempt is not None)
        say(f"it is exported: {reason}")
        note(home, run, "export", ran=True, why=reason)
        from serin.etl.raw_rows import read_test_rows
        from serin.export import build  # torch and ONNX: not for a run that only looks

        with (
            leased(
                export_needs(spec.export), home=home, purpose=f"export of {spec.name}", stop=stop, say=say
            ) as held,
            environment.showing_devices(held.ids),
            measure("export") as measurement,
        ):
            bundle = build.export_model(
                spec,
                checkpoint,
                dataset,
                store=Store.open(),
                lineage={**lineage, "export": key},
                read_rows=lambda features, most: read_test_rows(
                    spec.data, features, dataset, max_rows=most, say=say
                ),
                override=override,
                say=say,
            )
        keep_result(home, "export", key, bundle)
        keep_result(home, "export", parts.digest, bundle)  # the newest is what a run that is not fresh finds
        remember(home, spec.name, parts)
    return bundle, _page(bundle, measurement.receipt)


def find_bundle(
    spec: PipelineSpec, checkpoint: Checkpoint, dataset: Dataset, *, attempt: str | None = None
) -> Bundle | None:
    """The version that was exported from the same weights for the same spec, when the store still has it."""
    key = _name(export_parts(spec, checkpoint, dataset), attempt)
    found = find_result(environment.home(), "export", key, Bundle)
    if found is None:
        return _published_and_not_kept(spec.name, key)
    try:
        present = Store.open().bundle(found.model, found.version, hold=True)
    except NotFound:
        return None
    return present if present.digest == found.digest and _met_the_live_one(present) else None


def _published_and_not_kept(model: str, key: str) -> Bundle | None:
    """The newest version, when it is what this export gives: whoever made it died before it could say so."""
    versions = Store.open().versions(model)
    newest = Store.open().bundle(model, versions[-1], hold=True) if versions else None
    if newest is None or read_manifest(Path(newest.path)).lineage.get("export") != key:
        return None
    return newest if _met_the_live_one(newest) else None


def _met_the_live_one(bundle: Bundle) -> bool:
    """Is the version live itself, or was it held against the one that is live now?"""
    live = Store.open().aliases(bundle.model).get("live")
    report = Path(bundle.path) / "champion.json"
    met = json.loads(report.read_text(encoding="utf-8")).get("live_version") if report.is_file() else None
    return live in (met, bundle.version)


def export_parts(spec: PipelineSpec, checkpoint: Checkpoint, dataset: Dataset) -> StageKey:
    """A version holds its whole spec, by which it is rolled out, watched and trained again: all of it decides, but for
    the search, which nobody reads there. The code of a network that a script left is not that of the spec's model."""
    record = (Path(checkpoint.path) / RECORD).read_bytes()  # holds the digest of the weights
    trained = read_record(checkpoint.path).model
    operators = json.dumps([feature.operators for feature in spec.features])
    return key_of(
        "export", form=_FORMAT, name=spec.name, data=spec.data, features=spec.features, etl=spec.etl, model=spec.model,
        training=spec.training, export=spec.export, champion=spec.champion, serving=spec.serving,
        rollout=spec.rollout, monitoring=spec.monitoring, dataset=edition_of(dataset),
        weights=hashlib.sha256(record).hexdigest(), operators=operators,
        own_code=f"{own_code(spec.model)} {own_code(trained)}",
    )  # fmt: skip


def _name(parts: StageKey, attempt: str | None) -> str:
    """Of a result that is kept; one that was asked for afresh has its own."""
    return f"{parts.digest}-{attempt[:8]}" if attempt else parts.digest


def _variants(gate: dict[str, Any]) -> str:
    rows = [
        (one["name"], one["status"], one["bytes"], one["flops"], one["mix_us"], one["drop"], one["reason"])
        for one in gate["variants"]
    ]
    head = ("variant", "", "bytes", "operations per row", "us at the batch mix", "drop", "reason")
    timed = [
        (one["name"], one["mix_us"], f"{one['mix_us']:.0f} us") for one in gate["variants"] if one["mix_us"]
    ]
    speeds = drawing(bars(timed), "Time at the batch mix") if timed else ""
    return f"## Variants\n\n{table(head, [['' if cell is None else cell for cell in row] for row in rows])}\n{speeds}"


def _champion(bundle: Bundle) -> str:
    report = json.loads((Path(bundle.path) / "champion.json").read_text(encoding="utf-8"))
    by = f", overridden by {report['overridden_by']}" if report["overridden_by"] else ""
    return f"## Against the live model\n\n{report['verdict']}{by}: {report['reason']}\n"


def _page(bundle: Bundle, receipt: Receipt | None) -> str:
    gate: dict[str, Any] = json.loads((Path(bundle.path) / "gate.json").read_text(encoding="utf-8"))
    batches = ", ".join(str(size) for size in gate["batch_rows"])
    rounded = [
        ("logarithms and sines equal the ETL's within the last place", gate["golden_rows"], column)
        for column in gate["rounded_columns"]
    ]
    proofs = table(
        ("proof", "rows", "found"),
        [
            (
                "features equal the ETL's, bit for bit",
                gate["golden_rows"],
                f"{gate['feature_columns']} columns",
            ),
            *rounded,
            (
                f"scores equal {gate['made_by']}'s within {gate['tolerance']:g} (batches of {batches})",
                gate["golden_rows"],
                f"largest difference {gate['largest_score_difference']:.2g}",
            ),
        ],
    )
    metrics = table(
        ("metric on the test split", gate["made_by"], "ONNX"),
        [(name, value, gate["test_onnx"].get(name, "")) for name, value in gate["test_trained"].items()],
    )
    parts = [
        f"# {bundle.model} version {bundle.version}\n\nIn `{bundle.path}`.\n",
        proofs,
        metrics,
        _variants(gate),
        _champion(bundle),
        f"## Cost\n\n{receipt_table(receipt.to_json())}" if receipt else "",
    ]
    return "\n".join(part for part in parts if part)
