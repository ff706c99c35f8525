"""Validates a trained network: fuses it with its features, checks it in the gate, and chooses its best variant."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from serin.columns.segments import segment_masks
from serin.errors import ExportFailed, GateFailed
from serin.export.champion import ReadRows
from serin.export.convert.fuse import FeatureGraph, features2onnx, fuse
from serin.export.convert.network import Network, read_network
from serin.export.convert.onnx2trt import engine_of
from serin.export.gate.gate import (
    GoldenRows,
    batch_sizes,
    check_features,
    check_metric,
    check_scores,
    read_golden_rows,
    tile,
)
from serin.export.variants.build import CALIBRATION_ROWS, build_variants
from serin.export.variants.choose import judge_variants, race, thread_counts
from serin.export.variants.context import Runnable, TestRows, VariantContext
from serin.features.plan import FeaturePlan
from serin.formats.dataset import FEATURES, DatasetDescription
from serin.formats.gate import GateReport, Runtime, scores_apart
from serin.formats.schema import Schema, outputs_of
from serin.formats.shards import read_split
from serin.formats.wire import Array
from serin.machine import environment
from serin.machine.hardware import inventory
from serin.machine.stopping import check_stopped
from serin.scoring.session import Device, has_device, open_session, run_in_batches
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Checkpoint

logger = logging.getLogger(__name__)

_METRIC_BATCH_ROWS = 8192
_JUDGED_ROWS = 200_000
# Of the time with fewer threads: for a smaller gain the core is left to other requests.
_WORTH_A_THREAD = 0.95
_THREADS_SECONDS = 0.05  # for each number of threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A model that passed the gate and has no version yet. `core`: only for a GPU, with the features as its front."""

    model: onnx.ModelProto
    core: onnx.ModelProto | None
    plan_file: bytes | None  # a TensorRT engine of the core
    features: FeatureGraph
    plan: FeaturePlan
    schema: Schema
    golden: GoldenRows
    outputs: dict[str, Array]
    report: GateReport
    logits: Callable[[Array, Array], Array]  # of num and cat, as the chosen variant computes them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ground:
    """The inputs of a validation."""

    spec: PipelineSpec
    data: DatasetDescription
    folder: Path
    split: bool  # for a GPU: a front and a core
    device: Device  # where the core runs here
    read_rows: ReadRows | None
    network: Network
    features: FeatureGraph
    plan: FeaturePlan
    schema: Schema
    golden: GoldenRows


def prove_model(
    spec: PipelineSpec,
    checkpoint: Checkpoint,
    data: DatasetDescription,
    folder: Path,
    *,
    read_rows: ReadRows | None,
) -> Proven:
    """Validates a model. Raises GateFailed when the plain graph disagrees with the trainer; other variants may fail and
    are listed."""
    has_gpu = bool(inventory()) and has_device("cuda")
    split = has_gpu if spec.export.target == "auto" else spec.export.target == "gpu"
    device: Device = "cuda" if split and has_gpu else "cpu"
    if split and device == "cpu":
        logger.info(
            "the target is a GPU, but ONNX Runtime finds none here: front and core are validated on the CPU"
        )
    outputs = outputs_of(data.task, len(data.classes or ()), data.outputs)
    schema = Schema(
        task=data.task, inputs=data.inputs, outputs=outputs, classes=data.classes, targets=data.targets
    )
    logger.info("writing the model as ONNX")
    network = read_network(Path(checkpoint.path), data, tolerance=spec.export.tolerance)
    logger.info("writing the features as ONNX")
    plan = FeaturePlan.from_json(json.loads((folder / FEATURES).read_text(encoding="utf-8")))
    ground = _Ground(
        spec=spec,
        data=data,
        folder=folder,
        split=split,
        device=device,
        read_rows=read_rows,
        network=network,
        features=features2onnx(plan, data, folder),
        plan=plan,
        schema=schema,
        golden=read_golden_rows(folder, schema, data.numeric, [column.name for column in data.categorical]),
    )
    return _with_best_variant(ground, _pass_gate(ground, checkpoint.metrics))


def _pass_gate(ground: _Ground, reported: Mapping[str, float]) -> GateReport:
    """Compares the plain graph with the ETL and the trainer."""
    export, most = ground.spec.export, ground.spec.serving.max_batch_rows
    network, features, plan, golden = ground.network, ground.features, ground.plan, ground.golden
    model = fuse(features, network.graph, ground.schema)
    check_stopped()
    logger.info(f"gate: features and scores of {len(golden)} golden rows")
    check_features(model, (features.num, features.cat), golden, plan.approximate, most)
    scales, largest = check_scores(model, network, ground.schema, golden, export.tolerance, most)
    check_stopped()
    logger.info(f"gate: metrics on {ground.data.rows['test']:,} test rows")
    batches, scale = read_split(ground.folder, "test").batches(_METRIC_BATCH_ROWS), scales.get("score")
    rows, trained, exported = check_metric(
        network, batches, ground.data.task, export.tolerance, reported, scale
    )
    return GateReport(
        golden_rows=len(golden),
        batch_rows=batch_sizes(len(golden), most),
        feature_columns=len(golden.numeric) + len(golden.categorical) - len(plan.approximate),
        rounded_columns=tuple(plan.approximate),
        tolerance=export.tolerance,
        largest_score_difference=largest,
        allowed_difference=export.tolerance,
        test_rows=rows,
        made_by=network.made_by,
        test_trained=trained,
        test_onnx=exported,
        target="gpu" if ground.split else "cpu",
        scales=scales,
    )


def _with_best_variant(ground: _Ground, report: GateReport) -> Proven:
    export, golden = ground.spec.export, ground.golden
    max_rows, rows = ground.spec.serving.max_batch_rows, _calibration(ground.folder)
    variants = list(build_variants(export.variants, ground.network, rows, ground.device))
    context = VariantContext(
        spec=export,
        schema=ground.schema,
        features=ground.features,
        golden=golden,
        rows=_judged_rows(ground, len(variants) > 1),
        max_rows=max_rows,
        split=ground.split,
        scale=report.scales.get("score"),
    )
    chosen, judged = judge_variants(context, variants)
    outputs = run_in_batches(chosen.runs, golden.inputs, context.outputs, len(golden))
    apart = _check_front_and_core(context, chosen) if ground.split else None
    runtime = measure_threads(chosen.model, golden, export.batch_mix, context.outputs)
    plain = chosen.variant.name == "fp32" and not ground.split
    engine = None
    if chosen.variant.device == "tensorrt":
        engine = engine_of(chosen.core, max_rows=max_rows, cache=environment.home() / "cache" / "tensorrt")
    return Proven(
        model=chosen.model,
        core=chosen.core if ground.split else None,
        plan_file=engine[0] if engine else None,
        features=ground.features,
        plan=ground.plan,
        schema=ground.schema,
        golden=golden,
        outputs=outputs,
        logits=_logits(chosen),
        report=replace(
            report,
            engine_key=engine[1] if engine else None,
            allowed_difference=report.allowed_difference if plain else export.variant_tolerance,
            chosen=chosen.variant.name,
            variants=judged,
            front_core_difference=apart,
            runtime=replace(runtime, spread=_spread(context, chosen, outputs)),
        ),
    )


def _logits(chosen: Runnable) -> Callable[[Array, Array], Array]:
    """Returns the chosen variant as a function of the features."""
    session = open_session(chosen.variant.graph, device=chosen.variant.device)
    return lambda num, cat: run_in_batches(session, {"num": num, "cat": cat}, ["logits"], _METRIC_BATCH_ROWS)[
        "logits"
    ]


def _spread(context: VariantContext, chosen: Runnable, outputs: Mapping[str, Array]) -> float:
    """Returns how far scores vary with the batch size: what a client may see between one request and another."""
    name, largest = context.outputs[-1], 0.0
    for size in (1, 8, 64):
        found = run_in_batches(chosen.runs, context.golden.inputs, [name], size)[name]
        apart = scores_apart(found, outputs[name], context.scale)
        largest = max(largest, float(np.max(apart, initial=0.0)))
    return largest


def _check_front_and_core(context: VariantContext, chosen: Runnable) -> float:
    """Raises GateFailed unless front and core give the same as the whole graph, on the device that serves them."""
    whole = open_session(chosen.model, threads=1)
    wanted = run_in_batches(whole, context.golden.inputs, context.outputs, len(context.golden))
    allowed, largest = context.spec.variant_tolerance, 0.0
    for size in batch_sizes(len(context.golden), context.max_rows):
        rows = context.golden.tiled(size)
        found = run_in_batches(chosen.runs, rows.inputs, context.outputs, size)
        name = context.outputs[-1]
        expected = tile(wanted[name], len(rows))
        difference = float(np.max(scores_apart(found[name], expected, context.scale), initial=0.0))
        if not difference <= allowed:
            raise GateFailed(
                stage="front and core",
                what=f"{name!r} differs from the whole graph at batch size {size}",
                found=f"by {difference:.3g}, allowed {allowed:g}",
                column=name,
            )
        largest = max(largest, difference)
    return largest


def measure_threads(
    model: onnx.ModelProto, golden: GoldenRows, mix: Mapping[int, float], outputs: Sequence[str]
) -> Runtime:
    """Returns the fewest threads with which requests of the batch mix are answered about as fast as with any."""
    sessions = {str(count): open_session(model, threads=count) for count in thread_counts()}
    taken = dict.fromkeys(sessions, 0.0)
    for rows, share in mix.items():
        feed = {name: tile(values, rows)[:rows] for name, values in golden.inputs.items()}
        runs = {name: partial(session.run, list(outputs), feed) for name, session in sessions.items()}
        for name, micros in race(runs, seconds=_THREADS_SECONDS).items():
            taken[name] += share * micros
    best = "1"
    for name in sorted(taken, key=int):
        if taken[name] < _WORTH_A_THREAD * taken[best]:
            best = name
    return Runtime(threads=int(best), mix_us={name: round(micros, 1) for name, micros in taken.items()})


def _calibration(folder: Path) -> dict[str, Array]:
    """Returns training rows from all over the split."""
    rows = read_split(folder, "train").whole()
    places = np.linspace(0, len(rows) - 1, min(CALIBRATION_ROWS, len(rows))).astype(np.int64)
    return {"num": np.asarray(rows.num[places]), "cat": rows.cat[places].astype(np.int64)}


def _judged_rows(ground: _Ground, several: bool) -> TestRows:
    """Returns the newest test rows for the variants, with their segments if there is more than one variant to judge."""
    rows = read_split(ground.folder, "test").whole()
    rows = rows[max(0, len(rows) - _JUDGED_ROWS) :] if len(rows) > _JUDGED_ROWS else rows
    masks: dict[str, Array] = {}
    if several and ground.spec.export.segments:
        if ground.read_rows is None:
            raise ExportFailed(
                what="the variants", reason="export.segments needs raw rows, which are not available"
            )
        raw = ground.read_rows(ground.spec.features, _JUDGED_ROWS)
        order = np.argsort(raw.row, kind="stable")
        known = np.searchsorted(raw.row[order], rows.rows)
        place = order[np.minimum(known, len(order) - 1)]
        same = raw.row[place] == rows.rows
        for name, mask in segment_masks(raw.table, ground.spec.export.segments).items():
            masks[name] = mask[place] & same
    return TestRows(
        num=np.asarray(rows.num), cat=np.asarray(rows.cat), target=np.asarray(rows.target), segments=masks
    )
