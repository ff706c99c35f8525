"""Builds an edition of a published version: the same network with newer lookup tables in the front of its graph.

The features are built by the code that built them at export; the rest of the graph is taken as it is. What the golden
rows of the version proved of the network is still true. What the tables change is proved again: the features of the
graph equal the ETL's, bit for bit, and rows whose features did not change get the answers that they had.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import ExportFailed, GateFailed
from serin.export.build import copy_lookups
from serin.export.convert.fuse import FeatureGraph, features2onnx
from serin.export.gate.gate import GoldenRows, check_features, golden_of, write_golden
from serin.export.publish import seal_bundle
from serin.features.plan import FeaturePlan
from serin.formats.bundle import FRONT, GOLDEN, MANIFEST, MODEL, Manifest, read_golden, read_manifest
from serin.formats.dataset import FEATURES, DerivedDescription, LookupDescription
from serin.formats.external_data import check_graph, read_graph, write_graph
from serin.formats.gate import GATE, read_scales, scores_apart
from serin.formats.lookups import FILE as LOOKUPS
from serin.formats.lookups import Lookups
from serin.formats.schema import InputColumn, Schema, read_schema
from serin.formats.wire import Array
from serin.machine.documents import read_if_any
from serin.scoring.session import open_session, run_in_batches
from serin.spec.stored import stored_section
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store

_TABLES = "lookups"
_SAME_ANSWER = 1e-5  # the same features through the same network on the same runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the front of a graph is built from, beside the fitted features."""

    inputs: tuple[InputColumn, ...]
    lookups: tuple[LookupDescription, ...]
    derived: tuple[DerivedDescription, ...]


def read_plan(bundle: Path) -> FeaturePlan:
    """The fitted features of a version."""
    return FeaturePlan.from_json(json.loads((bundle / FEATURES).read_text(encoding="utf-8")))


def publish_edition(
    store: Store, base: Bundle, number: int, *, lookups: Lookups, tables: Path, golden: pa.Table
) -> Bundle:
    """Publishes edition `number` of the version in `base`, whole or not at all.

    `tables`: the folder with the files of `lookups`. `golden`: rows with the features that the ETL computed from them.
    Raises GateFailed when the graph does not give these features.
    """
    folder, release = Path(base.path), Release(model=base.model, version=base.version, edition=number)
    manifest = read_manifest(folder)
    with store.workspace() as work:
        _copy_rest(folder, manifest, work)
        lookups = copy_lookups(work, lookups, tables)
        _write_graphs(folder, work, lookups, golden, release)
        return seal_bundle(
            store,
            release,
            work,
            spec_digest=manifest.spec_digest,
            lineage={
                **manifest.lineage,
                "edition": {"of": manifest.digest, "read": lookups.read, "rows": lookups.rows},
            },
            metrics=manifest.metrics,
        )


def _copy_rest(folder: Path, manifest: Manifest, work: Path) -> None:
    """Copies what the lookups do not change."""
    for name in manifest.files:
        if name in (MODEL, FRONT, GOLDEN, LOOKUPS, MANIFEST) or name.startswith(f"{_TABLES}/"):
            continue
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, work / name)


def _write_graphs(folder: Path, work: Path, lookups: Lookups, golden: pa.Table, release: Release) -> None:
    schema, plan = read_schema(folder), read_plan(folder)
    served = Served(inputs=schema.inputs, lookups=lookups.tables, derived=lookups.derived)
    features = features2onnx(plan, served, work)
    if (folder / FRONT).is_file():
        _write_front(folder / FRONT, work / FRONT, features, release)
    model = with_features(read_graph(folder / MODEL), features)
    _name(model, release)
    rows = golden_of(golden, schema, plan.numeric, [output.name for output in plan.categorical])
    serving = stored_section(folder, "serving")
    check_features(model, (features.num, features.cat), rows, plan.approximate, serving.get("max_batch_rows"))
    names = [output.name for output in schema.outputs]
    outputs = run_in_batches(open_session(model), rows.inputs, names, len(rows))
    _check_unchanged(folder, schema, rows, outputs)
    write_graph(model, work / MODEL)
    write_golden(work, rows, outputs)


def _write_front(before: Path, to: Path, features: FeatureGraph, release: Release) -> None:
    front = read_graph(before)
    del features.model.metadata_props[:]
    features.model.metadata_props.extend(front.metadata_props)
    features.model.graph.name = front.graph.name
    _name(features.model, release)
    write_graph(features.model, to)


def _name(model: onnx.ModelProto, release: Release) -> None:
    model.metadata_props.add(key="edition", value=str(release.edition))


def with_features(model: onnx.ModelProto, features: FeatureGraph) -> onnx.ModelProto:
    """The fused graph with other lookup tables in its features. `features`: of the same plan; its graph becomes the
    result, so that large tables are not in memory a second time.

    Raises ExportFailed when the two do not have the same nodes: then another version of Serin has built the graph.
    """
    ours, theirs = features.model.graph, model.graph
    names = {node.name: _form(node) for node in ours.node}
    found = {node.name: _form(node) for node in theirs.node if node.name in names}
    constants = {tensor.name for tensor in ours.initializer}
    if found != names or not constants <= {tensor.name for tensor in theirs.initializer}:
        reason = "another version of Serin has built the features of this version; export the model again"
        raise ExportFailed(what="the edition", reason=reason)
    made = {name for node in ours.node for name in node.output}
    rest = {
        "node": [node for node in theirs.node if node.name not in names],
        "initializer": [tensor for tensor in theirs.initializer if tensor.name not in constants],
        "value_info": [value for value in theirs.value_info if value.name not in made],
    }
    for field, kept in rest.items():
        theirs.ClearField(field)
        getattr(theirs, field).extend(kept)
    for field in ("input", "output"):
        ours.ClearField(field)
    for field in ("opset_import", "metadata_props"):
        features.model.ClearField(field)
    features.model.MergeFrom(model)  # adds the nodes of the network after those of the features
    check_graph(features.model)
    return features.model


def _form(node: onnx.NodeProto) -> tuple[object, ...]:
    return node.op_type, tuple(node.input), tuple(node.output)


def _check_unchanged(folder: Path, schema: Schema, rows: GoldenRows, outputs: dict[str, Array]) -> None:
    """Raises GateFailed for a golden row that has the features of the version's own and gets another answer."""
    golden = read_golden(folder, schema)
    before = pq.read_table(folder / GOLDEN)
    count = len(golden)
    same = np.ones(count, bool)
    for name, ours in ((f"num__{each}", rows.num[:count, at]) for at, each in enumerate(rows.numeric)):
        theirs = before.column(name).to_numpy()
        same &= (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    for at, each in enumerate(rows.categorical):
        same &= rows.cat[:count, at] == before.column(f"cat__{each}").to_numpy()
    scales = read_scales(read_if_any(folder / GATE))
    for name, answers in outputs.items():
        if name == "label":
            continue  # two classes may tie; the probabilities decide
        apart = scores_apart(answers[:count], golden.outputs[name], scales.get(name)).reshape(count, -1)
        wrong = same & ~(apart.max(axis=1, initial=0.0) <= _allowed(folder))
        if wrong.any():
            first = int(np.argmax(wrong))
            raise GateFailed(
                stage="scores",
                what=f"{name!r} differs in {int(wrong.sum())} golden rows whose features did not change",
                found=f"row {golden.row[first]}: {golden.outputs[name][first]}, now {answers[first]}",
                column=name,
                row=int(golden.row[first]),
            )


def _allowed(folder: Path) -> float:
    gate = read_if_any(folder / GATE)
    return max(_SAME_ANSWER, float(gate.get("allowed_difference", 0.0)))
