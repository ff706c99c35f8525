"""From trained weights and the dataset they were trained on to a published, proven model version."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from serin.artifacts import Bundle, Checkpoint, Dataset, Release
from serin.export.card import model_card
from serin.export.features2onnx import features2onnx
from serin.export.fuse import fuse, name_model
from serin.export.gate import Batch, GateReport, batch_sizes, check_features, check_metric, check_scores
from serin.export.golden import GoldenRows, read_golden_rows, write_golden
from serin.export.network import read_network
from serin.features.plan import FeaturePlan
from serin.formats.bundle import MODEL, write_manifest
from serin.formats.dataset import FEATURES, DatasetDescription, read_dataset
from serin.formats.schema import Schema, outputs_of, write_schema
from serin.formats.shards import read_split
from serin.formats.wire import Array
from serin.spec.pipeline import PipelineSpec
from serin.store import Store

_METRIC_BATCH_ROWS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A model that passed the gate and has no name yet."""

    model: onnx.ModelProto
    plan: FeaturePlan
    schema: Schema
    golden: GoldenRows
    outputs: dict[str, Array]
    report: GateReport


def export_model(
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    dataset: Dataset,
    *,
    store: Store,
    lineage: Mapping[str, Any],
    say: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Export, prove, publish. A model that fails the gate (GateFailed) takes no version number."""
    folder = Path(dataset.path)
    description = read_dataset(folder)
    proven = _prove(spec, checkpoint, description, folder, say)
    release = Release(model=spec.name, version=store.reserve_version(spec.name))
    facts = {
        **lineage,
        "dataset": description.digest,
        "training_step": checkpoint.step,
    }  # keeps the dataset alive
    with store.workspace() as work:
        _fill(work, spec, release, proven, description, folder, checkpoint.metrics, facts)
        write_manifest(
            work,
            name=release.model,
            model_version=release.version,
            spec_digest=spec.digest(),
            lineage=facts,
            metrics=checkpoint.metrics,
        )
        bundle = store.publish_bundle(release.model, release.version, work)
    say(f"published {release.name}")
    return bundle


def _prove(
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    data: DatasetDescription,
    folder: Path,
    say: Callable[[str], None],
) -> Proven:
    outputs = outputs_of(data.task, len(data.classes or ()))
    schema = Schema(task=data.task, inputs=data.inputs, outputs=outputs, classes=data.classes)
    say("writing the network as ONNX")
    network = read_network(Path(checkpoint.path), data, tolerance=spec.export.tolerance)
    say("writing the features as ONNX")
    plan = FeaturePlan.from_json(json.loads((folder / FEATURES).read_text(encoding="utf-8")))
    features = features2onnx(plan, data, folder)
    model = fuse(features, network.graph, schema)
    golden = read_golden_rows(folder, schema, data.numeric, [column.name for column in data.categorical])
    say(f"gate: features and scores of {len(golden)} golden rows")
    check_features(model, (features.num, features.cat), golden, plan.approximate)
    answers, largest = check_scores(model, network, schema, golden, spec.export.tolerance)
    say(f"gate: metrics on {data.rows['test']:,} test rows")
    rows, by_torch, by_onnx = check_metric(
        network, _test_batches(folder), data.task, spec.export.tolerance, checkpoint.metrics
    )
    report = GateReport(
        golden_rows=len(golden),
        batch_rows=batch_sizes(len(golden)),
        feature_columns=len(golden.numeric) + len(golden.categorical) - len(plan.approximate),
        rounded_columns=tuple(plan.approximate),
        tolerance=spec.export.tolerance,
        largest_score_difference=largest,
        test_rows=rows,
        test_torch=by_torch,
        test_onnx=by_onnx,
    )
    return Proven(model=model, plan=plan, schema=schema, golden=golden, outputs=answers, report=report)


def _test_batches(folder: Path) -> Iterator[Batch]:
    split = read_split(folder, "test")
    for num, cat, target in zip(split.num, split.cat, split.target, strict=True):
        for at in range(0, len(target), _METRIC_BATCH_ROWS):
            rows = slice(at, at + _METRIC_BATCH_ROWS)
            yield np.array(num[rows]), cat[rows].astype(np.int64), np.asarray(target[rows])


def _fill(
    work: Path,
    spec: PipelineSpec,
    release: Release,
    proven: Proven,
    data: DatasetDescription,
    folder: Path,
    metrics: Mapping[str, float],
    lineage: Mapping[str, Any],
) -> None:
    """Every file of the bundle but its manifest."""
    properties = {"name": release.model, "version": str(release.version), "spec_digest": spec.digest()}
    name_model(proven.model, properties)
    (work / MODEL).write_bytes(proven.model.SerializeToString(deterministic=True))
    (work / "spec.yaml").write_text(spec.to_yaml(), encoding="utf-8")
    write_schema(work, proven.schema)
    write_golden(work, proven.golden, proven.outputs)
    _write_json(work / "metrics.json", {"format": "serin.metrics", **metrics})
    _write_json(work / "gate.json", proven.report.to_json())
    shutil.copyfile(folder / FEATURES, work / FEATURES)
    _copy_lookups(work, data, folder)
    card = model_card(
        spec, release, data, proven.plan, proven.schema, proven.report, metrics=metrics, lineage=lineage
    )
    (work / "card.md").write_text(card, encoding="utf-8")


def _copy_lookups(work: Path, data: DatasetDescription, folder: Path) -> None:
    """The tables that the graph holds, for people to read. A table may be called anything, a bundle's file may not."""
    for position, table in enumerate(data.lookups):
        target = work / "lookups" / f"{re.sub('[^A-Za-z0-9_]', '_', table.name)[:100]}.parquet"
        if target.exists():
            target = target.with_stem(f"{target.stem}_{position}")
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / table.file, target)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
