"""Chooses the served variant: the fastest at the batch mix among those that agree with fp32.

    scores    on the golden rows a variant's answers are close to fp32's at every batch size, and to each other
    metric    on the test rows it loses no more than the budget allows, overall and in each segment
    speed     it is faster than fp32; else fp32 is kept

A variant that fails is listed with the reason and the node at which it first differs from fp32, and is never served.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx

from serin.errors import ExportFailed
from serin.export.gate.gate import batch_sizes
from serin.export.gate.golden import GoldenRows, tile
from serin.export.gate.quality import loss, measure
from serin.export.variants.build import Unavailable, Variant
from serin.export.variants.context import Runnable, VariantContext, open_runnable
from serin.export.variants.first_divergence import first_divergence
from serin.formats.gate import VariantResult, scores_apart
from serin.formats.wire import Array
from serin.machine.hardware import core_count
from serin.machine.stopping import check_stopped
from serin.scoring.answers import answers
from serin.scoring.session import RUNTIME_ERRORS, open_session, run_in_batches

logger = logging.getLogger(__name__)

_STEADY = 1e-3  # allowed variation of a row's score with the batch size: sums are computed in another order
_FASTER = 0.95  # of fp32's time; a smaller gain is within the noise of the measurement
_SLOW = 5.0  # times fp32: such a variant is measured on few rows only
_SLOW_SIZES = (1, 8)
_METRIC_SECONDS = 3.0
_METRIC_BATCH_ROWS = 4096
_NOT_SERVED = "experimental: measured, not served"
_SEGMENT_ROWS = 200  # a segment with fewer is not judged
_PRODUCTS = {"Gemm", "MatMul", "MatMulInteger", "QGemm", "QLinearMatMul", "FusedMatMul"}
_FREE = {
    "Gather", "Reshape", "Concat", "Cast", "Identity", "Transpose", "Squeeze", "Unsqueeze", "Shape", "Expand", "Slice",
    "Split", "Flatten", "Constant", "ConstantOfShape", "Where", "QuantizeLinear", "DequantizeLinear",
    "DynamicQuantizeLinear",
}  # fmt: skip

Shapes = Mapping[str, Sequence[int]]
_SECONDS = 0.15  # for each contender
_ROUNDS = (5, 200)
HOPELESS = 20.0  # a contender this many times slower than the fastest is not run again

Run = Callable[[], object]


class Refused(Exception):
    """Why a variant is not served, and where it differs from fp32. Never leaves this module."""

    def __init__(self, reason: str, node: str | None = None) -> None:
        super().__init__(reason)
        self.node = node


def judge_variants(
    context: VariantContext, variants: Sequence[Variant | Unavailable]
) -> tuple[Runnable, tuple[VariantResult, ...]]:
    """Returns the variant to serve, and the results of each. The first is fp32, which has already passed the gate."""
    assert isinstance(variants[0], Variant)
    entries: dict[str, Runnable] = {}
    judged: dict[str, VariantResult] = {}
    for variant in variants:
        if isinstance(variant, Unavailable):
            judged[variant.name] = VariantResult(
                name=variant.name, status="unavailable", reason=variant.reason
            )
            continue
        check_stopped()
        try:
            entries[variant.name] = open_runnable(context, variant)
        except ExportFailed as error:
            reason = str(error.fields["reason"])
            judged[variant.name] = VariantResult(name=variant.name, status="unavailable", reason=reason)
    timed = _measure_latency(context, entries, judged)
    base = entries[variants[0].name]
    for name in timed:
        check_stopped()
        judged[name] = _judge(context, base, entries[name], timed[name], timed[base.variant.name])
        logger.info(
            f"gate: {name} {judged[name].status}{f': {judged[name].reason}' if judged[name].reason else ''}"
        )
    served = {name: one for name, one in judged.items() if not _experimental(entries, name)}
    chosen = _choose(served, base.variant.name)
    judged[chosen] = replace(judged[chosen], status="chosen")
    return entries[chosen], tuple(judged[variant.name] for variant in variants)


def _experimental(entries: Mapping[str, Runnable], name: str) -> bool:
    return name in entries and entries[name].variant.experimental


def _measure_latency(
    context: VariantContext, entries: Mapping[str, Runnable], judged: dict[str, VariantResult]
) -> dict[str, dict[int, float]]:
    """Returns microseconds by batch rows for each variant; one that cannot run at all is refused for that."""
    runnable = {}
    for name, entry in entries.items():
        try:
            entry.runs.run(context.outputs, _feed(context.golden, 1))
            runnable[name] = entry
        except RUNTIME_ERRORS as error:
            reason = f"it does not run here: {str(error).splitlines()[0]}"
            judged[name] = VariantResult(name=name, status="unavailable", reason=reason)
    timed: dict[str, dict[int, float]] = {name: {} for name in runnable}
    base = next(iter(runnable))
    for rows in sorted({*context.spec.batch_mix, 1, 64}):
        feed = _feed(context.golden, rows)
        runs = {name: partial(entry.runs.run, context.outputs, feed) for name, entry in runnable.items()}
        found = race(runs)
        for name, taken in found.items():
            timed[name][rows] = round(taken, 1)
            if taken > HOPELESS * min(found.values()) and name != base:  # which the others are compared with
                del runnable[name]  # larger batches would take minutes without new information
    return timed


def _over_mix(timed: Mapping[int, float], mix: Mapping[int, float]) -> float | None:
    """Returns the mean time of a request; None when a size was not measured."""
    if not timed.keys() >= mix.keys():
        return None
    return round(sum(share * timed[rows] for rows, share in mix.items()), 1)


def _feed(golden: GoldenRows, rows: int) -> dict[str, Array]:
    return {name: tile(values, rows)[:rows] for name, values in golden.inputs.items()}


def _judge(
    context: VariantContext,
    base: Runnable,
    entry: Runnable,
    timed: dict[int, float],
    base_timed: dict[int, float],
) -> VariantResult:
    mix = context.spec.batch_mix
    found = VariantResult(
        name=entry.variant.name,
        status="passed",
        bytes=entry.variant.graph.ByteSize(),
        flops=count_flops(entry.variant.graph),
        latency_us=timed,
        mix_us=_over_mix(timed, mix),
    )
    base_us = _over_mix(base_timed, mix)
    slow = found.mix_us is None or base_us is None or found.mix_us > _SLOW * base_us
    largest = max(timed)
    try:
        found = _with_quality(context, base, entry, found, timed[largest] / largest)
        sizes = _SLOW_SIZES if slow else batch_sizes(len(context.golden), context.max_rows)
        found = replace(found, largest_score_difference=_check_scores(context, base, entry, sizes))
        _check_budget(context, found)
        if slow:
            taken = f"{timed[largest]:,.0f} us for {largest} rows, fp32 {base_timed[largest]:,.0f}"
            raise Refused(f"it is much too slow here: {taken}")
    except Refused as refusal:
        return replace(found, status="rejected", reason=str(refusal), node=refusal.node)
    return replace(found, reason=_NOT_SERVED) if entry.variant.experimental else found


def _check_scores(context: VariantContext, base: Runnable, entry: Runnable, sizes: Sequence[int]) -> float:
    """Returns the largest difference from fp32 on the golden rows, at any of the sizes. Refuses when it is too
    large."""
    wanted = run_in_batches(base.runs, context.golden.inputs, context.outputs, len(context.golden))
    largest, alone = 0.0, None
    for size in sizes:
        rows = context.golden.tiled(size)
        found = run_in_batches(entry.runs, rows.inputs, context.outputs, size)
        expected = {name: tile(values, len(rows)) for name, values in wanted.items()}
        allowed, whom = math.inf if entry.variant.learned else context.spec.variant_tolerance, "fp32"
        largest = max(largest, _near(context, entry, base, found, expected, rows, size, allowed, whom))
        alone = found if alone is None else alone
        if entry.variant.steady:
            itself = {name: tile(values, len(rows)) for name, values in alone.items()}
            whom = f"itself at batch size {sizes[0]}"
            _near(context, entry, base, found, itself, rows, size, _STEADY, whom)
    return largest


def _near(
    context: VariantContext,
    entry: Runnable,
    base: Runnable,
    found: Mapping[str, Array],
    wanted: Mapping[str, Array],
    rows: GoldenRows,
    size: int,
    allowed: float,
    whom: str,
) -> float:
    """Returns the largest difference; raises Refused with the row, the batch size and the node when it is above
    `allowed`."""
    name = context.outputs[-1]  # the score, or the probabilities, which decide the label
    difference = scores_apart(found[name], wanted[name], context.scale)
    wrong = ~(difference <= allowed)
    if not wrong.any():
        return float(difference.max(initial=0.0))
    places = np.flatnonzero(wrong.any(axis=1))
    first = int(places[0])
    start = first - first % size
    inside = slice(start, min(start + size, len(rows)))
    feed = {"num": rows.num[inside], "cat": rows.cat[inside].astype(np.int64)}
    node = first_divergence(
        base.variant.graph, entry.variant.graph, feed, allowed=allowed, device=entry.variant.device
    )
    raise Refused(
        f"{name!r} differs from {whom} in {len(places)} of {len(rows)} golden rows at batch size {size}, first in row "
        f"{rows.row[first]}: by {difference[first].max():.3g}, allowed {allowed:g}"
        + (f"; {node}" if node is not None else ""),
        None if node is None else node.node,
    )


def _with_quality(
    context: VariantContext, base: Runnable, entry: Runnable, found: VariantResult, row_us: float
) -> VariantResult:
    """Measures metrics on the test rows, and the loss against fp32. A slow variant is measured on fewer rows."""
    rows = context.rows
    count = min(len(rows.target), max(200, int(_METRIC_SECONDS * 1e6 / row_us)))
    target = rows.target[:count]
    ours, theirs = (_scores(context, each, count) for each in (entry, base))
    if not all(np.isfinite(values).all() for values in ours.values()):
        raise Refused(f"its answers to some of {count:,} test rows are not finite")
    task = context.schema.task
    measured, reference = measure(target, ours, task), measure(target, theirs, task)
    metric = context.metric
    drop = loss(metric, reference[metric], measured[metric]) if metric in reference else None
    segments = {}
    for name, mask in rows.segments.items():
        inside = mask[:count]
        if np.count_nonzero(inside) < _SEGMENT_ROWS:
            continue
        own = measure(target[inside], {key: values[inside] for key, values in ours.items()}, task)
        other = measure(target[inside], {key: values[inside] for key, values in theirs.items()}, task)
        if metric in own and metric in other:
            segments[name] = loss(metric, other[metric], own[metric])
    worst_first = dict(sorted(segments.items(), key=lambda pair: -pair[1]))
    return replace(found, test_rows=count, metrics=measured, drop=drop, segments=worst_first)


def _scores(context: VariantContext, entry: Runnable, count: int) -> dict[str, Array]:
    session = open_session(entry.variant.graph, device=entry.variant.device)
    feed = {"num": context.rows.num[:count], "cat": context.rows.cat[:count].astype(np.int64)}
    logits = run_in_batches(session, feed, ["logits"], _METRIC_BATCH_ROWS)["logits"]
    return answers(logits, context.schema.task)


def _check_budget(context: VariantContext, found: VariantResult) -> None:
    budget = context.spec.budget
    if found.drop is not None and not found.drop <= budget.max_drop:
        raise Refused(f"{context.metric} on {found.test_rows:,} test rows drops by {found.drop:.4g}, "
                      f"allowed {budget.max_drop:g}")  # fmt: skip
    for segment, drop in found.segments.items():
        if not drop <= budget.segment_max_drop:
            raise Refused(
                f"{context.metric} of {segment} drops by {drop:.4g}, allowed {budget.segment_max_drop:g}"
            )


def _choose(judged: Mapping[str, VariantResult], base: str) -> str:
    """Returns the fastest variant that passed; fp32 unless another is faster by more than the noise."""
    passed = {name: one for name, one in judged.items() if one.status == "passed" and one.mix_us is not None}
    fastest = min(passed, key=lambda name: passed[name].mix_us or 0.0)
    limit = _FASTER * (judged[base].mix_us or 0.0)
    return fastest if (passed[fastest].mix_us or 0.0) < limit else base


# A matrix product of n by k by m counts 2nkm, whatever the width of its numbers; an elementwise operator counts one per
# element; moving data counts nothing; a tree counts its longest path.
def count_flops(network: onnx.ModelProto) -> int:
    """Counts floating-point (or integer) operations for a batch of one row. Nodes of unknown shape count nothing."""
    model = onnx.ModelProto()
    model.CopyFrom(network)
    for tensor in (*model.graph.input, *model.graph.output):
        for dim in tensor.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = 1
    del model.graph.value_info[:]
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes: dict[str, Sequence[int]] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        shapes[info.name] = tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
    return sum(_cost(node, shapes) for node in graph.node)


def _cost(node: onnx.NodeProto, shapes: Shapes) -> int:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "TreeEnsemble":
        return _longest_paths(attributes)
    if node.op_type in _FREE or not node.output:
        return 0
    made = shapes.get(node.output[0], ())
    size = int(np.prod(made)) if made else 0
    if node.op_type in _PRODUCTS:
        left = shapes.get(node.input[0], ())
        if not left:
            return 0
        inner = left[-2] if "transA" in attributes and attributes["transA"].i else left[-1]
        return 2 * size * int(inner)
    return size


def _longest_paths(attributes: Mapping[str, onnx.AttributeProto]) -> int:
    """Counts the comparisons on the longest path of each tree, and one addition for it."""
    children = (
        (attributes["nodes_truenodeids"].ints, attributes["nodes_trueleafs"].ints),
        (attributes["nodes_falsenodeids"].ints, attributes["nodes_falseleafs"].ints),
    )
    total = 0
    for root in attributes["tree_roots"].ints:
        level = {root}
        while level:
            total += 1
            level = {ids[node] for node in level for ids, leafs in children if not leafs[node]}
        total += 1
    return total


def race(contenders: Mapping[str, Run], *, seconds: float = _SECONDS) -> dict[str, float]:
    """Returns the median microseconds of each. The first run of each is a warm-up and does not count."""
    first = {}
    for name, run in contenders.items():
        first[name] = _warm(run)
    fastest = min(first.values())
    racing = {name: run for name, run in contenders.items() if first[name] <= HOPELESS * fastest}
    taken: dict[str, list[float]] = {name: [] for name in racing}
    spent, rounds = 0.0, 0
    while rounds < _ROUNDS[0] or (rounds < _ROUNDS[1] and spent < seconds * len(racing)):
        for name, run in racing.items():
            begin = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - begin)
            spent += taken[name][-1]
        rounds += 1
    found = {name: statistics.median(times) for name, times in taken.items()}
    return {name: 1e6 * found.get(name, first[name]) for name in contenders}


def _warm(run: Run) -> float:
    """Returns the best of a few runs after the first, fewer when they take long."""
    run()
    taken: list[float] = []
    while not taken or (len(taken) < 5 and sum(taken) < 0.05):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def thread_counts() -> tuple[int, ...]:
    """Returns 1, 2, 4 ... up to the cores this process may use, at most 16."""
    cores = min(core_count(), 16)
    return tuple(sorted({1, cores, *(count for count in (2, 4, 8) if count <= cores)}))
