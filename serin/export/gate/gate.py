"""The gate: the checks that an exported graph must pass before it is published.

    features    on the golden rows the graph's features equal the ETL's, bit for bit, at every batch size (results of
                logarithms and sines within 1 ulp)
    scores      on the golden rows the graph's answers equal the trainer's within the tolerance, at every batch size. In
                a regression it is in standard deviations of the scores, beyond what rounding of their sums explains
    metric      on the whole test split the exported network has the trainer's metric
    checkpoint  on the test split the trainer has the metric that training reported

The first check that fails raises GateFailed with its name, the column and the first row that differ. Several batch
sizes are tried, because an optimised kernel may be right for one row and wrong for eight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from statistics import fmean

import numpy as np
import onnx

from serin.columns.exact import alike
from serin.errors import GateFailed
from serin.export.convert.network import Network
from serin.export.gate.golden import GoldenRows, tile
from serin.export.gate.quality import measure
from serin.formats.gate import ScoreScale, scores_apart
from serin.formats.schema import Schema, Task
from serin.formats.wire import Array
from serin.scoring.answers import answers
from serin.scoring.session import open_session, run_in_batches, with_tensors

BATCHES = (1, 2, 3, 7, 8, 9, 16, 63, 64, 65)
CHECKPOINT_TOLERANCE = 0.01  # training may have measured in bf16 or on another device
NOTHING: Mapping[str, float] = {}
Batch = tuple[Array, Array, Array]  # num float32[n, k], cat int64[n, m], target[n]


def batch_sizes(rows: int, max_rows: int | None = None) -> tuple[int, ...]:
    """Returns the sizes to try: those that the golden rows fill, all of them at once, and the largest served batch."""
    return tuple(sorted({size for size in BATCHES if size < rows} | {rows, max_rows or rows}))


def check_features(
    model: onnx.ModelProto,
    tensors: tuple[str, str],
    golden: GoldenRows,
    approximate: Mapping[str, float] = NOTHING,
    max_rows: int | None = None,
) -> None:
    """Compares the fused graph's own feature tensors with the ETL's columns; `approximate` ones may differ slightly."""
    num, cat = tensors
    session = open_session(with_tensors(model, tensors))
    given = golden
    for size in batch_sizes(len(given), max_rows):
        golden = given.tiled(size)
        found = run_in_batches(session, golden.inputs, [num, cat], size)
        _same_bits(found[num], golden.num, golden.numeric, golden.row, size, approximate)
        _same_bits(found[cat], golden.cat.astype(np.int64), golden.categorical, golden.row, size)


def _same_bits(
    found: Array,
    wanted: Array,
    columns: Sequence[str],
    rows: Array,
    size: int,
    approximate: Mapping[str, float] = NOTHING,
) -> None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise GateFailed(
            stage="features",
            what="the graph's features have another shape",
            found=f"{found.dtype}{list(found.shape)}, the ETL's {wanted.dtype}{list(wanted.shape)}",
        )
    for position, column in enumerate(columns):
        ours, theirs = found[:, position], wanted[:, position]
        different = (
            ~alike(ours, theirs, approximate[column])
            if column in approximate
            else _bits(ours) != _bits(theirs)
        )
        if different.any():
            first = int(np.argmax(different))
            raise GateFailed(
                stage="features",
                what=f"column {column!r} differs in {int(different.sum())} of {len(rows)} golden rows "
                f"at batch size {size}, first in row {rows[first]}",
                found=f"ETL {theirs[first]!r}, graph {ours[first]!r}",
                column=column,
                row=int(rows[first]),
            )


def _bits(values: Array) -> Array:
    """Returns bits for exact comparison; all NaNs are equal."""
    if values.dtype != np.float32:
        return values
    return np.where(np.isnan(values), np.uint32(0x7FC00000), np.ascontiguousarray(values).view(np.uint32))


def check_scores(
    model: onnx.ModelProto,
    network: Network,
    schema: Schema,
    golden: GoldenRows,
    tolerance: float,
    max_rows: int | None = None,
) -> tuple[dict[str, ScoreScale], float]:
    """Compares the graph's answers with the trainer's. Returns what a regression's differences are measured in, and the
    largest difference."""
    session, who = open_session(model), network.made_by
    wanted = answers(network.reference(golden.num, golden.cat.astype(np.int64)), schema.task)
    names, largest = [output.name for output in schema.outputs], 0.0
    scales = {name: network.scale(wanted[name]) for name in names} if schema.task == "regression" else {}
    for size in batch_sizes(len(golden), max_rows):
        rows = golden.tiled(size)
        found = run_in_batches(session, rows.inputs, names, size)
        expected = {name: tile(values, len(rows)) for name, values in wanted.items()}
        for name in names:
            scale = scales.get(name)
            largest = max(largest, _close(found, expected, name, scale, rows.row, tolerance, size, who))
    return scales, largest


def _close(
    found: Mapping[str, Array],
    wanted: Mapping[str, Array],
    name: str,
    scale: ScoreScale | None,
    rows: Array,
    tolerance: float,
    size: int,
    who: str,
) -> float:
    """Returns the largest difference in one output; raises GateFailed when it is too large."""
    ours, theirs = found[name], wanted[name]
    if ours.shape != theirs.shape:
        form = f"{ours.shape}, {who}'s {theirs.shape}"
        raise GateFailed(stage="scores", what=f"{name!r} has another shape", found=form, column=name)
    if name == "label":  # two classes may tie within the tolerance; `probabilities` decides
        best = np.take_along_axis(wanted["probabilities"], ours, axis=1)
        difference = wanted["probabilities"].max(axis=1, keepdims=True) - best
    else:
        difference = scores_apart(ours, theirs, scale)
    wrong = ~(difference <= tolerance)  # a NaN is wrong too
    if wrong.any():
        first, at = np.argwhere(wrong)[0]
        unit = "" if scale is None else f" standard deviations of the scores ({scale.unit[at]:.6g})"
        raise GateFailed(
            stage="scores",
            what=f"{name!r} differs from {who} in {int(wrong.any(axis=1).sum())} of {len(rows)} golden rows "
            f"at batch size {size}, first in row {rows[first]}",
            found=_told(who, theirs[first, at], ours[first, at], difference[first, at], tolerance, unit),
            column=name,
            row=int(rows[first]),
        )
    return float(difference.max(initial=0.0))


def _told(who: str, wanted: float, found: float, apart: float, tolerance: float, unit: str) -> str:
    if not np.isfinite(wanted):
        return f"{who} itself answers {wanted}; the row has values that the network cannot handle: clip them"
    return (
        f"{who} {wanted:.9g}, graph {found:.9g}; the difference is {apart:.3g}{unit}, "
        f"export.tolerance allows {tolerance:g}"
    )


def check_metric(
    network: Network,
    batches: Iterable[Batch],
    task: Task,
    tolerance: float,
    reported: Mapping[str, float],
    scale: ScoreScale | None = None,
) -> tuple[int, dict[str, float], dict[str, float]]:
    """Returns rows of the test split, the trainer's metrics and the exported network's. `reported`: what training
    measured. `scale`: of a regression's scores."""
    session = open_session(network.graph)
    targets, ours, theirs = [], [], []
    for num, cat, target in batches:
        (logits,) = session.run(["logits"], {"num": num, "cat": cat})
        ours.append(logits)
        theirs.append(network.reference(num, cat))
        targets.append(target)
    if not targets:
        raise GateFailed(stage="metric", what="the test split", found="is empty, nothing can be measured")
    target = np.concatenate(targets)
    trained_metrics = measure(target, answers(np.concatenate(theirs), task), task)
    onnx_metrics = measure(target, answers(np.concatenate(ours), task), task)
    unit, rounding = (1.0, 0.0) if scale is None else (fmean(scale.unit), fmean(scale.rounding))
    for name, wanted in trained_metrics.items():
        size, trained = max(unit, abs(wanted)), reported.get(f"test_{name}", wanted)
        allowed = tolerance * size + rounding
        _near("metric", name, "exported network", onnx_metrics[name], wanted, allowed)
        _near("checkpoint", name, "training", trained, wanted, CHECKPOINT_TOLERANCE * size + rounding)
    return len(target), trained_metrics, onnx_metrics


def _near(stage: str, name: str, who: str, found: float, wanted: float, allowed: float) -> None:
    if not abs(found - wanted) <= allowed:
        apart = f"{who} {found:.6g}, now {wanted:.6g}, allowed {allowed:.3g} apart"
        raise GateFailed(stage=stage, what=f"{name} on the test split", found=apart)


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries used in the checks, for gate.json."""
    import onnxruntime

    return {"torch": version("torch"), "onnx": version("onnx"), "onnxruntime": str(onnxruntime.__version__)}
