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
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx
from onnx import helper

from serin.errors import ExportFailed
from serin.export.gate.gate import GoldenRows, batch_sizes, tile
from serin.export.gate.quality import loss, measure
from serin.export.variants.build import Unavailable, Variant
from serin.export.variants.context import Runnable, VariantContext, open_runnable
from serin.formats.gate import VariantResult, scores_apart
from serin.formats.wire import Array
from serin.machine.hardware import core_count
from serin.machine.stopping import check_stopped
from serin.scoring.answers import answers
from serin.scoring.session import RUNTIME_ERRORS, Device, open_session, run_in_batches, run_with_inner

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
_SEEN = "_DequantizeLinear_Output"  # as ONNX Runtime's quantiser names it
_SMALL = 0.01  # of a common row's value: a row near zero is not a scale


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
    judge = _Judge(context, base, timed)
    for name in timed:
        check_stopped()
        judged[name] = judge.result(entries[name])
        logger.info(
            f"gate: {name} {judged[name].status}{f': {judged[name].reason}' if judged[name].reason else ''}"
        )
    experimental = {name for name, entry in entries.items() if entry.variant.experimental}
    served = {name: one for name, one in judged.items() if name not in experimental}
    chosen = _choose(served, base.variant.name)
    judged[chosen] = replace(judged[chosen], status="chosen")
    return entries[chosen], tuple(judged[variant.name] for variant in variants)


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


class _Judge:
    """Compares variants with `base`, which is fp32. `timed`: microseconds by batch rows for each of them."""

    def __init__(
        self, context: VariantContext, base: Runnable, timed: Mapping[str, Mapping[int, float]]
    ) -> None:
        self._context, self._base, self._timed = context, base, timed
        self._known: dict[tuple[str, int], dict[str, Array]] = {}

    def result(self, entry: Runnable) -> VariantResult:
        context, timed = self._context, self._timed[entry.variant.name]
        base_timed = self._timed[self._base.variant.name]
        result = VariantResult(
            name=entry.variant.name,
            status="passed",
            bytes=entry.variant.graph.ByteSize(),
            flops=count_flops(entry.variant.graph),
            latency_us=dict(timed),
            mix_us=_over_mix(timed, context.spec.batch_mix),
        )
        base_us = _over_mix(base_timed, context.spec.batch_mix)
        slow = result.mix_us is None or base_us is None or result.mix_us > _SLOW * base_us
        largest = max(timed)
        try:
            result = self._with_quality(entry, result, timed[largest] / largest)
            sizes = _SLOW_SIZES if slow else batch_sizes(len(context.golden), context.max_rows)
            result = replace(result, largest_score_difference=self._check_scores(entry, sizes))
            self._check_budget(result)
            if slow:
                taken = f"{timed[largest]:,.0f} us for {largest} rows, fp32 {base_timed[largest]:,.0f}"
                raise Refused(f"it is much too slow here: {taken}")
        except Refused as refusal:
            return replace(result, status="rejected", reason=str(refusal), node=refusal.node)
        return replace(result, reason=_NOT_SERVED) if entry.variant.experimental else result

    def _check_scores(self, entry: Runnable, sizes: Sequence[int]) -> float:
        """Returns the largest difference from fp32 on the golden rows, at any of the sizes. Refuses when it is too
        large."""
        golden, outputs = self._context.golden, self._context.outputs
        wanted = run_in_batches(self._base.runs, golden.inputs, outputs, len(golden))
        largest, alone = 0.0, None
        for size in sizes:
            rows = golden.tiled(size)
            found = run_in_batches(entry.runs, rows.inputs, outputs, size)
            allowed = math.inf if entry.variant.learned else self._context.spec.variant_tolerance
            largest = max(largest, self._near(entry, found, wanted, rows, size, allowed, "fp32"))
            alone = found if alone is None else alone
            if entry.variant.steady:
                whom = f"itself at batch size {sizes[0]}"
                self._near(entry, found, alone, rows, size, _STEADY, whom)
        return largest

    def _near(
        self,
        entry: Runnable,
        found: Mapping[str, Array],
        wanted: Mapping[str, Array],
        rows: GoldenRows,
        size: int,
        allowed: float,
        whom: str,
    ) -> float:
        """Returns the largest difference; raises Refused with the row, the batch size and the node when it is above
        `allowed`."""
        name = self._context.outputs[-1]  # the score, or the probabilities, which decide the label
        difference = scores_apart(found[name], tile(wanted[name], len(rows)), self._context.scale)
        wrong = ~(difference <= allowed)
        if not wrong.any():
            return float(difference.max(initial=0.0))
        places = np.flatnonzero(wrong.any(axis=1))
        first = int(places[0])
        start = first - first % size
        inside = slice(start, min(start + size, len(rows)))
        feed = {"num": rows.num[inside], "cat": rows.cat[inside].astype(np.int64)}
        graphs = self._base.variant.graph, entry.variant.graph
        node = first_divergence(*graphs, feed, allowed=allowed, device=entry.variant.device)
        raise Refused(
            f"{name!r} differs from {whom} in {len(places)} of {len(rows)} golden rows at batch size {size}, first in "
            f"row {rows.row[first]}: by {difference[first].max():.3g}, allowed {allowed:g}"
            + (f"; {node}" if node is not None else ""),
            None if node is None else node.node,
        )

    def _with_quality(self, entry: Runnable, result: VariantResult, row_us: float) -> VariantResult:
        """Measures metrics on the test rows, and the loss against fp32. A slow variant is measured on fewer rows."""
        rows, task, metric = self._context.rows, self._context.schema.task, self._context.metric
        count = min(len(rows.target), max(200, int(_METRIC_SECONDS * 1e6 / row_us)))
        target = rows.target[:count]
        ours, theirs = (self._scores(each, count) for each in (entry, self._base))
        if not all(np.isfinite(values).all() for values in ours.values()):
            raise Refused(f"its answers to some of {count:,} test rows are not finite")
        measured, reference = measure(target, ours, task), measure(target, theirs, task)
        drop = loss(metric, reference[metric], measured[metric]) if metric in reference else None
        segments = {}
        for name, mask in rows.segments.items():
            inside = mask[:count]
            if np.count_nonzero(inside) < _SEGMENT_ROWS:
                continue
            own, other = (
                measure(target[inside], {key: values[inside] for key, values in each.items()}, task)
                for each in (ours, theirs)
            )
            if metric in own and metric in other:
                segments[name] = loss(metric, other[metric], own[metric])
        worst_first = dict(sorted(segments.items(), key=lambda pair: -pair[1]))
        return replace(result, test_rows=count, metrics=measured, drop=drop, segments=worst_first)

    def _scores(self, entry: Runnable, count: int) -> dict[str, Array]:
        """The answers to the first test rows. Those of fp32 are kept: every variant is compared with them."""
        name, rows = entry.variant.name, self._context.rows
        if (name, count) not in self._known:
            session = open_session(entry.variant.graph, device=entry.variant.device)
            feed = {"num": rows.num[:count], "cat": rows.cat[:count].astype(np.int64)}
            logits = run_in_batches(session, feed, ["logits"], _METRIC_BATCH_ROWS)["logits"]
            self._known[name, count] = answers(logits, self._context.schema.task)
        return self._known[name, count]

    def _check_budget(self, result: VariantResult) -> None:
        budget, metric = self._context.spec.budget, self._context.metric
        if result.drop is not None and not result.drop <= budget.max_drop:
            raise Refused(
                f"{metric} on {result.test_rows:,} test rows drops by {result.drop:.4g}, allowed {budget.max_drop:g}"
            )
        for segment, drop in result.segments.items():
            if not drop <= budget.segment_max_drop:
                raise Refused(
                    f"{metric} of {segment} drops by {drop:.4g}, allowed {budget.segment_max_drop:g}"
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
    model = deepcopy(network)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A node that differs. `node` outputs `tensor`; `apart`: the largest difference in a row over its largest value."""

    node: str
    operator: str
    tensor: str
    apart: float

    def __str__(self) -> str:
        return f"node {self.node!r} ({self.operator}) differs by {self.apart:.2g} of its value"


# Both graphs output the tensors that have the same name in each, for the rows that showed the difference. A node is
# then judged by itself: the reference's operator gets the inputs of the variant's, so that neither an earlier error nor
# the noise that all layers add hides the wrong one.
def first_divergence(
    reference: onnx.ModelProto,
    variant: onnx.ModelProto,
    feed: Mapping[str, Array],
    *,
    allowed: float,
    device: Device = "cpu",
) -> Divergence | None:
    """Returns the first node that differs by more than `allowed`; else the one that differs most."""
    given = {name for node in variant.graph.node for name in node.output}
    tensors = [name for node in reference.graph.node for name in node.output if name in given]
    wanted = {**feed, **run_with_inner(reference, feed, tensors)}
    # The value that consumers of a quantised tensor see: a Relu may be implemented by its clamp alone.
    seen = {name: f"{name}{_SEEN}" if f"{name}{_SEEN}" in given else name for name in tensors}
    inner = run_with_inner(variant, feed, list(seen.values()), device)
    found = {**feed, **{name: inner[other] for name, other in seen.items()}}
    worst: Divergence | None = None
    for node in reference.graph.node:
        result = node.output[0]
        if result not in found:
            continue
        made = _by_reference(reference, node, wanted, found)
        apart = _apart(found[result], wanted[result] if made is None else made)
        here = Divergence(node=node.name, operator=node.op_type, tensor=result, apart=apart)
        if not apart <= allowed:
            return here
        if worst is None or apart > worst.apart:
            worst = here
    return None if worst is None or worst.apart <= 0 else worst


def _by_reference(
    model: onnx.ModelProto, node: onnx.NodeProto, wanted: Mapping[str, Array], found: Mapping[str, Array]
) -> Array | None:
    """Returns the output of the reference's operator for the variant's inputs; None where they do not fit it."""
    names = [name for name in dict.fromkeys(node.input) if name in wanted]
    inputs = {name: found.get(name, wanted[name]).astype(wanted[name].dtype) for name in names}
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), list(array.shape)
            )
            for name, array in inputs.items()
        ],
        [onnx.ValueInfoProto(name=node.output[0])],
        initializer=[tensor for tensor in model.graph.initializer if tensor.name in node.input],
    )
    alone = helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    try:
        return np.asarray(open_session(alone).run([node.output[0]], inputs)[0])
    except ExportFailed:
        return None
    except RUNTIME_ERRORS:
        return None


def _apart(found: Array, wanted: Array) -> float:
    """Returns the largest difference in a row over the row's largest value, so that no extreme row hides the others."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.size:
        return 0.0
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    both = np.isfinite(wanted)
    if not np.array_equal(both, np.isfinite(found)):
        return float("inf")
    rows = len(wanted) if wanted.ndim > 1 else 1
    value = np.where(both, np.abs(wanted), 0.0).reshape(rows, -1).max(axis=1)
    with np.errstate(invalid="ignore"):
        difference = np.where(both, np.abs(found - wanted), 0.0).reshape(rows, -1).max(axis=1)
    common = np.sort(value[value > 0])
    scale = np.maximum(value, _SMALL * common[len(common) // 4]) if len(common) else value
    return float(np.max(np.where(scale > 0, difference / np.where(scale > 0, scale, 1.0), difference)))
