"""Builds a published, validated model version from trained weights and their dataset."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import ExportFailed
from serin.export.champion import ReadRows, meet_champion
from serin.export.convert.fuse import name_model
from serin.export.drift.build import ReadTraining, version_statistics
from serin.export.explain import keep_for_explanations, measure_importance, trace_features
from serin.export.gate.gate import check_groups, write_golden
from serin.export.gate.quality import measure_quality
from serin.export.gate.windows import check_windows
from serin.export.own_inputs import export_own_inputs
from serin.export.publish import publish_version
from serin.export.validate import Proven, prove_model
from serin.formats.bundle import CORE, FRONT, MODEL, PLAN, TREES
from serin.formats.dataset import FEATURES, DatasetDescription, read_dataset
from serin.formats.drift import FILE as DRIFT
from serin.formats.drift import DriftStatistics
from serin.formats.explain import FeatureColumns
from serin.formats.external_data import write_graph
from serin.formats.importance import FILE as IMPORTANCE
from serin.formats.importance import Importance
from serin.formats.lookups import Lookups, write_lookups
from serin.formats.quality import FILE as QUALITY
from serin.formats.quality import QualityReference
from serin.formats.trained import read_record, read_trained
from serin.formats.windows import copy_windows
from serin.formats.wire import Array, RawRows, to_wire
from serin.machine.documents import write_facts
from serin.machine.stopping import check_stopped
from serin.reports.model_card import model_card
from serin.scoring.predict import BATCH_ROWS
from serin.scoring.session import open_session, run_in_batches
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Dataset, Release
from serin.store.store import Store

_GROUPED_ROWS = 100_000  # test rows by group, the newest
_SOURCES = 1000  # files that a manifest names; the dataset names all

Score = Callable[[pa.Table], dict[str, Array]]


def export_model(
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    dataset: Dataset,
    *,
    store: Store,
    lineage: Mapping[str, Any],
    read_rows: ReadRows | None = None,
    read_training: ReadTraining | None = None,
    approved_by: str | None = None,
    claim: str | None = None,
) -> Bundle:
    """Exports, validates, compares with the live model and publishes.

    A model that fails the gate (GateFailed) or is worse than the live model (ChampionRefused) gets no version number.
    `approved_by`: the person who approves it although it is worse. `claim`: see Store.reserve_version.
    """
    if not spec.has_data:
        return export_own_inputs(
            spec, checkpoint, store=store, lineage=lineage, approved_by=approved_by, claim=claim
        )
    description = read_dataset(folder := check_windows(Path(dataset.path)))
    proven = prove_model(spec, checkpoint, description, folder, read_rows=read_rows)
    columns, score = trace_features(proven.plan, description), _scores(proven)
    task, metric = description.task, spec.export.budget.metric
    importance = measure_importance(proven.logits, folder, columns, task, metric)
    proven, quality = _judged(spec, proven, score, folder, read_rows)
    champion = meet_champion(
        spec, score, proven.schema, store=store, read_rows=read_rows, approved_by=approved_by
    )
    drift = version_statistics(spec, proven.schema, score, importance, read_training, read_rows)
    check_stopped()
    measured = {IMPORTANCE: importance, QUALITY: quality, DRIFT: drift}
    release = Release(model=spec.name, version=store.reserve_version(spec.name, claim=claim))
    facts = _lineage(lineage, description, checkpoint)
    names = {"name": release.model, "version": str(release.version), "spec_digest": spec.digest()}
    known = (description, proven.plan, proven.schema, proven.report, champion)
    card = model_card(spec, release, *known, metrics=checkpoint.metrics, lineage=facts, importance=importance)
    return publish_version(
        spec,
        release,
        checkpoint,
        store=store,
        lineage=facts,
        schema=proven.schema,
        report=proven.report,
        champion=champion,
        card=card,
        fill=lambda work: _fill(work, names, proven, description, folder, checkpoint, columns, measured),
    )


def _judged(
    spec: PipelineSpec, proven: Proven, score: Score, folder: Path, read_rows: ReadRows | None
) -> tuple[Proven, QualityReference]:
    """The model with the groups of `export.segments` in its report, and its quality on the test rows. GateFailed when
    the version is worse for one of the groups."""
    rows = _raw_rows(spec, read_rows)
    given = None if rows is None else score(rows.table)
    if spec.export.segments and rows is not None and given is not None:
        groups = check_groups(spec.export, proven.schema, rows.table, rows.target, given)
        proven = replace(proven, report=replace(proven.report, groups=groups))
    return proven, measure_quality(spec, proven.schema, folder, proven.logits, rows, given)


def _raw_rows(spec: PipelineSpec, read_rows: ReadRows | None) -> RawRows | None:
    """The newest test rows as requests would bring them; None when neither segments nor `monitoring.quality` need
    them."""
    if not spec.export.segments and spec.monitoring.quality is None:
        return None
    if read_rows is None:
        what = "export.segments needs" if spec.export.segments else "monitoring.quality needs"
        raise ExportFailed(what="the groups", reason=f"{what} raw rows, which are not available")
    return read_rows(spec.features, _GROUPED_ROWS)


def _lineage(given: Mapping[str, Any], data: DatasetDescription, checkpoint: Checkpoint) -> dict[str, Any]:
    """Where the version comes from. The store keeps a dataset that a manifest names."""
    sources = [
        {"table": file.table, "path": file.path, "bytes": file.size, "modified": file.modified}
        | ({} if file.snapshot is None else {"snapshot": asdict(file.snapshot)})
        for file in data.sources[:_SOURCES]
    ]
    return {**given, "dataset": data.digest, "training_step": checkpoint.step, "sources": sources}


def _fill(
    work: Path,
    names: Mapping[str, str],
    proven: Proven,
    data: DatasetDescription,
    folder: Path,
    checkpoint: Checkpoint,
    columns: FeatureColumns,
    measured: Mapping[str, Importance | QualityReference | DriftStatistics | None],
) -> None:
    """The graphs, golden rows, fitted features and lookup tables of a bundle, and what explains its scores."""
    chosen, trained = proven.report.chosen, Path(checkpoint.path)
    properties = {**names, "variant": chosen}
    graphs = {MODEL: proven.model}
    if proven.core is not None:
        graphs |= {FRONT: proven.features.model, CORE: proven.core}
    for name, graph in graphs.items():
        name_model(graph, properties)
        write_graph(graph, work / name)
    if proven.plan_file is not None:
        (work / PLAN).write_bytes(proven.plan_file)
    if proven.core is not None and read_record(trained).file == TREES:
        (work / TREES).write_bytes(read_trained(trained)[1])  # a GPU runs trees from XGBoost's own file
    write_golden(work, proven.golden, proven.outputs)
    shutil.copyfile(folder / FEATURES, work / FEATURES)
    copy_lookups(work, _lookups(data, folder), folder)
    copy_windows(folder, work)
    keep_for_explanations(work, trained, folder, columns, proven.features, variant=chosen)
    for name, each in measured.items():
        if each is not None:
            write_facts(work / name, each.to_json())


def _scores(proven: Proven) -> Score:
    """Returns the candidate's scoring function for raw rows, before there is a bundle."""
    session = open_session(proven.model)
    names = [output.name for output in proven.schema.outputs]
    return lambda table: run_in_batches(session, to_wire(table, proven.schema), names, BATCH_ROWS)


def _lookups(data: DatasetDescription, folder: Path) -> Lookups:
    """The lookups of a dataset. They were read when its files were written."""
    files = [folder / table.file for table in data.lookups]
    return Lookups(
        read=min((file.stat().st_mtime for file in files), default=0.0),
        tables=data.lookups,
        rows={
            table.name: pq.read_metadata(file).num_rows
            for table, file in zip(data.lookups, files, strict=True)
        },
        derived=data.derived,
    )


def copy_lookups(work: Path, lookups: Lookups, folder: Path) -> Lookups:
    """Copies the lookup tables of a graph from `folder` into a bundle, for people to read and to be refreshed. A table
    may have any name, a bundle's file may not. Returns the lookups with the bundle's files."""
    copied = []
    for position, table in enumerate(lookups.tables):
        target = work / "lookups" / f"{re.sub('[^A-Za-z0-9_]', '_', table.name)[:100]}.parquet"
        if target.exists():
            target = target.with_stem(f"{target.stem}_{position}")
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / table.file, target)
        copied.append(replace(table, file=target.relative_to(work).as_posix()))
    found = replace(lookups, tables=tuple(copied))
    if copied:
        write_lookups(work, found)
    return found
