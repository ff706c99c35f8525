"""Publishes a model with custom inputs (model.script or model.onnx without data).

There is no ETL to compare with and there are no test rows here: it must answer its golden rows at every batch size as
its own framework did, and its metrics are those that its script reported. The bundle is like any other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import ExportFailed, SpecError
from serin.export.champion import settle_contest
from serin.export.convert.fuse import name_model
from serin.export.gate.gate import batch_sizes, compare_answers
from serin.export.gate.quality import METRICS
from serin.export.publish import publish_version
from serin.formats.bundle import GOLDEN, MODEL, output_column
from serin.formats.champion import ChampionReport
from serin.formats.gate import GateReport, ScoreScale
from serin.formats.schema import Schema, read_schema
from serin.formats.trained import read_trained
from serin.formats.wire import Array, to_wire
from serin.metrics import HIGHER_IS_BETTER
from serin.reports.model_card import own_inputs_card
from serin.scoring.session import open_session, run_in_batches
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Release
from serin.store.store import Store

logger = logging.getLogger(__name__)


def export_own_inputs(
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    *,
    store: Store,
    lineage: Mapping[str, Any],
    approved_by: str | None,
    claim: str | None = None,
) -> Bundle:
    """Validates, compares the live model's metrics and publishes. Raises GateFailed and ChampionRefused like any other
    export."""
    folder = Path(checkpoint.path)
    _record, data = read_trained(folder)
    model, schema = onnx.load_model_from_string(data), read_schema(folder)
    if problems := [*spec.monitoring.capture.problems([column.name for column in schema.inputs])]:
        raise SpecError(where=spec.name, problems=problems)
    table, inputs, known = _golden(folder, schema)
    logger.info(f"gate: scores of {len(table)} golden rows")
    answers, report = _prove(spec, model, schema, inputs, known, checkpoint.metrics)
    champion = _meet_metrics(spec, schema, checkpoint.metrics, store, approved_by)
    release = Release(model=spec.name, version=store.reserve_version(spec.name, claim=claim))
    judged = (spec, release, schema, report, champion)
    card = own_inputs_card(*judged, metrics=checkpoint.metrics, lineage=lineage, known_answers=bool(known))

    def fill(work: Path) -> None:
        properties = {"name": release.model, "version": str(release.version), "spec_digest": spec.digest()}
        name_model(model, properties)
        (work / MODEL).write_bytes(model.SerializeToString(deterministic=True))
        golden = table.drop_columns([name for name in answers if name in table.column_names])
        for name, values in answers.items():
            golden = golden.append_column(name, output_column(values))
        pq.write_table(golden, work / GOLDEN, compression="zstd")

    return publish_version(
        spec,
        release,
        checkpoint,
        store=store,
        lineage=lineage,
        schema=schema,
        report=report,
        champion=champion,
        card=card,
        fill=fill,
    )


def _golden(folder: Path, schema: Schema) -> tuple[pa.Table, dict[str, Array], dict[str, Array]]:
    """Returns the rows, their inputs in wire form, and the known answers."""
    try:
        table = pq.read_table(folder / GOLDEN)
    except (OSError, pa.ArrowException) as error:
        raise ExportFailed(what="the golden rows", reason=str(error)) from error
    known = {}
    for output in schema.outputs:
        if output.name in table.column_names:
            column = table.column(output.name).combine_chunks()
            flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
            known[output.name] = np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(-1, *output.dims)
    return table, to_wire(table, schema), known


def _prove(
    spec: PipelineSpec,
    model: onnx.ModelProto,
    schema: Schema,
    inputs: Mapping[str, Array],
    known: Mapping[str, Array],
    metrics: Mapping[str, float],
) -> tuple[dict[str, Array], GateReport]:
    names, rows = [output.name for output in schema.outputs], len(next(iter(inputs.values())))
    answers = run_in_batches(open_session(model), inputs, names, rows)
    wanted, tolerance = {**answers, **known}, spec.export.tolerance
    if "label" in wanted:
        wanted["label"] = wanted["label"].astype(np.int64)
    scales = {name: ScoreScale.of(wanted[name]) for name in names} if schema.task == "regression" else {}
    who, most = f"model.{spec.model.kind}" if known else "itself in one batch", spec.serving.max_batch_rows
    largest = compare_answers(model, inputs, wanted, scales, np.arange(rows), who, tolerance, most)
    report = GateReport(
        golden_rows=rows,
        batch_rows=batch_sizes(rows, most),
        feature_columns=0,
        rounded_columns=(),
        tolerance=tolerance,
        largest_score_difference=largest,
        allowed_difference=tolerance,
        test_rows=0,
        made_by=who,
        test_trained=dict(metrics),
        test_onnx={},
        scales=scales,
    )
    return answers, report


def _meet_metrics(
    spec: PipelineSpec, schema: Schema, metrics: Mapping[str, float], store: Store, approved_by: str | None
) -> ChampionReport:
    """Compares the metrics that both versions' scripts reported; without them a person must approve."""
    live = store.aliases(spec.name).get("live")
    if live is None:
        return ChampionReport(verdict="not compared", reason="there is no live model")
    name = spec.champion.metric or METRICS[schema.task][0]
    ours, theirs = metrics.get(f"test_{name}"), store.bundle(spec.name, live).metrics.get(f"test_{name}")
    problem: str | None = f"the script reports no test_{name} in metrics.json, so it cannot be judged"
    reason = ""
    if ours is not None and theirs is not None:
        loss = theirs - ours if name in HIGHER_IS_BETTER else ours - theirs
        reason = f"its script reported test_{name} {ours:.6g}, version {live} reported {theirs:.6g}"
        problem = reason if loss > spec.champion.max_loss else None
    report = ChampionReport(verdict="better or equal", reason=reason, live_version=live, metric=name)
    return settle_contest(spec.name, live, report, problem, approved_by, compared=bool(reason))
