"""The gate: the checks that an exported graph must pass before it is published.

    features    on the golden rows the graph's features equal the ETL's, bit for bit, at every batch size (results of
                logarithms and sines within 1 ulp)
    scores      on the golden rows the graph's answers equal the trainer's within the tolerance, at every batch size. In
                a regression it is in standard deviations of the scores, beyond what rounding of their sums explains
    metric      on the whole test split the exported network has the trainer's metric
    checkpoint  on the test split the trainer has the metric that training reported
    groups      on the test rows no value of the columns in `export.segments` is worse than the other rows by more than
                a limit of `export.groups`

The first check that fails raises GateFailed with its name, the column and the first row that differ. Several batch
sizes are tried, because an optimised kernel may be right for one row and wrong for eight.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist, fmean

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq

from serin.columns.exact import alike
from serin.columns.segments import group_masks
from serin.errors import ExportFailed, GateFailed
from serin.export.convert.network import Network
from serin.export.gate.quality import METRICS, by_target, measure
from serin.formats.bundle import GOLDEN, output_column
from serin.formats.gate import GroupReport, GroupResult, Measured, ScoreScale, scores_apart
from serin.formats.schema import Schema, Task
from serin.formats.wire import Array, to_wire
from serin.metrics import HIGHER_IS_BETTER, estimate, estimate_share
from serin.scoring.answers import answers
from serin.scoring.session import open_session, run_in_batches, with_tensors
from serin.spec.export import ExportSpec, GroupsSpec, Metric

logger = logging.getLogger(__name__)


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
    with with_tensors(model, tensors):
        session = open_session(model)
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
    wanted = answers(network.reference(golden.num, golden.cat.astype(np.int64)), schema.task)
    names = [output.name for output in schema.outputs]
    scales = {name: network.scale(wanted[name]) for name in names} if schema.task == "regression" else {}
    largest = compare_answers(
        model, golden.inputs, wanted, scales, golden.row, network.made_by, tolerance, max_rows
    )
    return scales, largest


def compare_answers(
    model: onnx.ModelProto,
    inputs: Mapping[str, Array],
    wanted: Mapping[str, Array],
    scales: Mapping[str, ScoreScale],
    rows: Array,
    who: str,
    tolerance: float,
    max_rows: int | None = None,
) -> float:
    """Returns the largest difference of the graph's answers from `wanted`, those of `who`, at every batch size. Raises
    GateFailed when it is too large. `rows`: the numbers of the rows."""
    session, largest = open_session(model), 0.0
    for size in batch_sizes(len(rows), max_rows):
        fed, expected = (
            {name: tile(each, size) for name, each in given.items()} for given in (inputs, wanted)
        )
        found = run_in_batches(session, fed, list(wanted), size)
        for name in wanted:
            scale, tiled = scales.get(name), tile(rows, size)
            largest = max(largest, _close(found, expected, name, scale, tiled, tolerance, size, who))
    return largest


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
        here, there = (np.take_along_axis(wanted["probabilities"], each, axis=1) for each in (ours, theirs))
        difference = np.abs(there - here)
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
    with ThreadPoolExecutor(1) as beside:
        for num, cat, target in batches:
            exported = beside.submit(session.run, ["logits"], {"num": num, "cat": cat})
            theirs.append(network.reference(num, cat))
            ours.append(exported.result()[0])
            targets.append(target)
        if not targets:
            raise GateFailed(stage="metric", what="the test split", found="is empty, nothing can be measured")
        target = np.concatenate(targets)
        measured = beside.submit(lambda: measure(target, answers(np.concatenate(ours), task), task))
        trained_metrics = measure(target, answers(np.concatenate(theirs), task), task)
        onnx_metrics = measured.result()
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


# A group is compared with all other test rows. A version is refused when a group is worse by more than a limit and that
# is sure at the confidence, which is shared among the groups. Bands are normal approximations: DeLong's variance for
# AUC, the variance of the mean for losses and rates. Groups below `min_rows` rows are named and not judged.
def check_groups(
    export: ExportSpec, schema: Schema, table: pa.Table, target: Array, given: Mapping[str, Array]
) -> GroupReport:
    """Every group of the rows in `table`, which have this target and these answers. GateFailed when one is surely
    worse than a limit allows."""
    asked: GroupsSpec = export.groups
    metric: Metric = asked.metric or METRICS[schema.task][0]
    masks = group_masks(table, export.segments)
    judged = {name: mask for name, mask in masks.items() if np.count_nonzero(mask) >= asked.min_rows}
    parts = list(by_target(schema, target, given[schema.outputs[-1].name]))
    limits = (asked.max_gap is not None) + (asked.max_rate_gap is not None)
    sure = 1 - (1 - asked.confidence) / max(1, len(judged) * len(parts) * limits)
    judge = _Judge(asked, metric, schema.task == "binary", NormalDist().inv_cdf(sure))
    found = [
        judge.compare(f"{name}, target {key}" if key else name, mask, truth, scores)
        for name, mask in judged.items()
        for key, truth, scores in parts
    ]
    report = GroupReport(
        columns=export.segments,
        metric=metric,
        rows=len(target),
        confidence=asked.confidence,
        threshold=asked.threshold if schema.task == "binary" else None,
        min_rows=asked.min_rows,
        max_gap=asked.max_gap,
        max_rate_gap=asked.max_rate_gap,
        groups=tuple(found),
        small={name: int(np.count_nonzero(mask)) for name, mask in masks.items() if name not in judged},
    )
    logger.info(f"groups: {len(judged)} of {', '.join(export.segments)}, {len(report.small)} too small")
    if worse := [f"{one.group}: {one.worse}" for one in report.groups if one.worse]:
        raise GateFailed(
            stage="groups",
            what=f"{len(worse)} of {len(found)} groups beyond a limit, on {len(target):,} test rows",
            found="; ".join(worse),
        )
    return report


class _Judge:
    """Compares a group with the other rows. `sure`: standard errors by which a gap must be beyond its limit."""

    def __init__(self, asked: GroupsSpec, metric: Metric, has_rate: bool, sure: float) -> None:
        self._asked, self._metric, self._has_rate, self._sure = asked, metric, has_rate, sure
        self._shown = NormalDist().inv_cdf((1 + asked.confidence) / 2)

    def compare(self, group: str, mask: Array, target: Array, scores: Array) -> GroupResult:
        metric, gap, worse = self._quality(target[mask], scores[mask], target[~mask], scores[~mask])
        rate, rate_gap, apart = (
            self._rate(scores[mask], scores[~mask]) if self._has_rate else (None, None, "")
        )
        return GroupResult(
            group=group,
            rows=int(np.count_nonzero(mask)),
            metric=metric,
            gap=gap,
            rate=rate,
            rate_gap=rate_gap,
            worse=" and ".join(filter(None, (worse, apart))),
        )

    def _quality(
        self, target: Array, scores: Array, other_target: Array, other_scores: Array
    ) -> tuple[Measured | None, Measured | None, str]:
        try:
            own, own_error = estimate(self._metric, target, scores)
        except ValueError:
            return None, None, ""  # one class has no AUC
        shown = self._band(own, own_error)
        try:
            other, other_error = estimate(self._metric, other_target, other_scores)
        except ValueError:
            return shown, None, ""
        sign = -1.0 if self._metric in HIGHER_IS_BETTER else 1.0
        unit = other if self._metric == "rmse" and other else 1.0
        size, error = sign * (own - other) / unit, math.hypot(own_error, other_error) / unit
        sure, limit = size - self._sure * error, self._asked.max_gap
        worse = ""
        if limit is not None and sure > limit:
            worse = (
                f"{self._metric} {own:.4f}, other rows {other:.4f}: worse by {size:.4f}, surely by more than "
                f"{sure:.4f} (allowed {limit:g})"
            )
        return shown, self._band(size, error), worse

    def _rate(self, scores: Array, others: Array) -> tuple[Measured | None, Measured | None, str]:
        own, own_error = estimate_share(scores >= self._asked.threshold)
        shown = self._band(own, own_error, 0.0, 1.0)
        if not len(others):
            return shown, None, ""
        other, other_error = estimate_share(others >= self._asked.threshold)
        size, error = own - other, math.hypot(own_error, other_error)
        sure, limit = abs(size) - self._sure * error, self._asked.max_rate_gap
        apart = ""
        if limit is not None and sure > limit:
            apart = (
                f"selection rate {own:.4f}, other rows {other:.4f}: {abs(size):.4f} apart, surely more than "
                f"{sure:.4f} (allowed {limit:g})"
            )
        return shown, self._band(size, error), apart

    def _band(
        self, value: float, error: float, least: float = -math.inf, most: float = math.inf
    ) -> Measured | None:
        if not math.isfinite(error):
            return None
        low, high = value - self._shown * error, value + self._shown * error
        return Measured(value=value, low=max(low, least), high=min(high, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRows:
    """Rows in wire form with the features that the ETL computed for them."""

    table: pa.Table
    inputs: dict[str, Array]
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    num: Array  # float32[rows, k]
    cat: Array  # int32[rows, m]
    row: Array

    def __len__(self) -> int:
        return len(self.row)

    def tiled(self, rows: int) -> GoldenRows:
        """Repeats the rows until there are `rows`; returns them unchanged when there are enough."""
        if rows <= len(self):
            return self
        return replace(
            self,
            inputs={name: tile(values, rows) for name, values in self.inputs.items()},
            num=tile(self.num, rows),
            cat=tile(self.cat, rows),
            row=tile(self.row, rows),
        )


def tile(values: Array, rows: int) -> Array:
    """Repeats the first axis to `rows`."""
    return values if rows <= len(values) else values[np.arange(rows) % len(values)]


def read_golden_rows(
    dataset: Path, schema: Schema, numeric: Sequence[str], categorical: Sequence[str]
) -> GoldenRows:
    """Reads the golden rows of a dataset. Raises ExportFailed when there are none: without them nothing can be
    validated."""
    path = dataset / GOLDEN
    try:
        _refuse_twins(pq.read_schema(path).names)
        found = golden_of(pq.read_table(path), schema, numeric, categorical)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ExportFailed(what="the golden rows", reason=f"{path}: {error}") from error
    if not len(found):
        raise ExportFailed(what="the golden rows", reason=f"{path} has none")
    return found


def golden_of(
    table: pa.Table, schema: Schema, numeric: Sequence[str], categorical: Sequence[str]
) -> GoldenRows:
    """The golden rows in a table of requests, features (num__<name>, cat__<name>) and row ids."""
    return GoldenRows(
        table=table,
        inputs=to_wire(table, schema),
        numeric=tuple(numeric),
        categorical=tuple(categorical),
        num=_matrix(table, "num__", numeric, np.float32),
        cat=_matrix(table, "cat__", categorical, np.int32),
        row=np.asarray(table.column("row").to_numpy()),
    )


def write_golden(folder: Path, golden: GoldenRows, outputs: Mapping[str, Array]) -> None:
    """Writes golden.parquet of a bundle."""
    table = golden.table
    for name, values in outputs.items():
        table = table.append_column(name, output_column(values))
    pq.write_table(table, folder / GOLDEN, compression="zstd")


def _refuse_twins(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            reason = (
                f"request column {name!r} has a name that Serin uses in that file; rename it in its table"
            )
            raise ExportFailed(what="the golden rows", reason=reason)


def _matrix(table: pa.Table, prefix: str, names: Sequence[str], dtype: type) -> Array:
    columns = [np.asarray(table.column(prefix + name).to_numpy()) for name in names]
    matrix = np.stack(columns, axis=1) if columns else np.zeros((len(table), 0))
    return np.ascontiguousarray(matrix.astype(dtype))
