"""Chooses the served variant: the fastest at the batch mix among those that agree with fp32.

    scores    on the golden rows a variant's answers are close to fp32's at every batch size, and to each other
    metric    on the test rows it loses no more than the budget allows, overall and in each segment
    speed     it is faster than fp32; else fp32 is kept

A variant that fails is listed with the reason, and is never served.
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

from serin.errors import ExportFailed
from serin.export.gate.gate import GoldenRows, batch_sizes, tile
from serin.export.gate.quality import loss, measure
from serin.export.variants.build import Unavailable, Variant
from serin.export.variants.context import Runnable, VariantContext, open_runnable
from serin.formats.external_data import graph_bytes
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
_SEGMENT_ROWS = 200  # a segment with fewer is not judged
_SECONDS = 0.15  # for each contender
_ALONE_SECONDS = 0.05  # where there is nothing to choose
_ROUNDS = (5, 200)
HOPELESS = 20.0  # a contender this many times slower than the fastest is not run again

Run = Callable[[], object]


class Refused(Exception):
    """Why a variant is not served. Never leaves this module."""


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
    chosen = _choose(judged, base.variant.name)
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
    seconds = _SECONDS if len(runnable) > 1 else _ALONE_SECONDS
    for rows in sorted({*context.spec.batch_mix, 1, 64}):
        feed = _feed(context.golden, rows)
        runs = {name: partial(entry.runs.run, context.outputs, feed) for name, entry in runnable.items()}
        found = race(runs, seconds=seconds)
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
            bytes=graph_bytes(entry.variant.graph),
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
            return replace(result, status="rejected", reason=str(refusal))
        return result

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
            largest = max(largest, self._near(found, wanted, rows, size, allowed, "fp32"))
            alone = found if alone is None else alone
            if entry.variant.steady:
                whom = f"itself at batch size {sizes[0]}"
                self._near(found, alone, rows, size, _STEADY, whom)
        return largest

    def _near(
        self,
        found: Mapping[str, Array],
        wanted: Mapping[str, Array],
        rows: GoldenRows,
        size: int,
        allowed: float,
        whom: str,
    ) -> float:
        """Returns the largest difference; raises Refused with the row and the batch size when it is above `allowed`."""
        name = self._context.outputs[-1]  # the score, or the probabilities, which decide the label
        difference = scores_apart(found[name], tile(wanted[name], len(rows)), self._context.scale)
        wrong = ~(difference <= allowed)
        if not wrong.any():
            return float(difference.max(initial=0.0))
        places = np.flatnonzero(wrong.any(axis=1))
        first = int(places[0])
        raise Refused(
            f"{name!r} differs from {whom} in {len(places)} of {len(rows)} golden rows at batch size {size}, first in "
            f"row {rows.row[first]}: by {difference[first].max():.3g}, allowed {allowed:g}"
        )

    def _with_quality(self, entry: Runnable, result: VariantResult, row_us: float) -> VariantResult:
        """Measures metrics on the test rows, and the loss against fp32. A slow variant is measured on fewer rows."""
        rows, task, metric = self._context.rows, self._context.schema.task, self._context.metric
        count = min(len(rows.target), max(200, int(_METRIC_SECONDS * 1e6 / row_us)))
        target = rows.target[:count]
        ours, theirs = (self._scores(each, count) for each in (entry, self._base))
        if not all(np.isfinite(values).all() for values in ours.values()):
            raise Refused(f"its answers to some of {count:,} test rows are not finite")
        measured = measure(target, ours, task)
        reference = measured if entry is self._base else measure(target, theirs, task)
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
