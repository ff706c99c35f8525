"""From prepared pieces to a dataset's folder: split, look for leaks, fit, write, describe, seal, report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import TableEmpty
from serin.etl.binding.layout import Layout
from serin.etl.dataset.compare import judge_against
from serin.etl.dataset.golden import Candidates, Made, choose_golden
from serin.etl.dataset.leaks import Ids, collect_ids, judge_leaks
from serin.etl.dataset.relate_target import Extent, find_extents, relate_to_target
from serin.etl.dataset.seal import PartSeals, seal_dataset, write_lookup
from serin.etl.dataset.split import split_rule
from serin.etl.dataset.transform import (
    Divided,
    TrainSample,
    count_rows,
    divide,
    take_train_sample,
    target_ends,
    write_piece,
)
from serin.etl.engines.device import FileDigests, gpu_aware, to_host
from serin.etl.engines.engine import Engine, Held
from serin.etl.engines.progress import Progress
from serin.etl.relational.checks import write_freshness
from serin.etl.relational.relation import LoadedJoin
from serin.etl.relational.target import Class, check_classes, check_varies, first_target
from serin.etl.relational.totals import Totals, total_up
from serin.features.aggregates.aggregate import (
    Aggregate,
    Answer,
    Counted,
    answer_counted,
    counted_column,
    measure_sample,
    merge_answers,
)
from serin.features.aggregates.distribution import count_nulls, order_of_values
from serin.features.aggregates.value_counts import Counts, HighBits, ValueCounts, ValueTable
from serin.features.fitted import Sample
from serin.features.numbers import Numbers
from serin.features.plan import FeaturePlan
from serin.formats.dataset import (
    GOLDEN,
    SPLITS,
    STATISTICS,
    DatasetDescription,
    DerivedDescription,
    SourceFile,
    SplitDescription,
)
from serin.formats.schema import Kind
from serin.formats.shards import count_parts
from serin.formats.statistics import CategoryStatistics, ColumnStatistics, NumberStatistics, write_statistics
from serin.machine.durable import Syncs
from serin.reports.data_report import Report, render, write_report
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.spec.target import TargetSpec
from serin.store.artifacts import Dataset

logger = logging.getLogger(__name__)

Sizes = npt.NDArray[np.int64]  # rows by piece and split
_BINS = 64
_COMMONEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """One build. `previous`: the dataset before this one, which checks may compare with. `syncs`: brings the rows to
    the disk; a dataset is whole when nothing waits there any more. `files`: waits for the digests of the files."""

    data: DataSpec
    features: Sequence[FeatureSpec]
    layout: Layout
    joins: Sequence[LoadedJoin]
    files: Callable[[], Sequence[SourceFile]]
    previous: Dataset | None
    engine: Engine
    progress: Progress
    syncs: Syncs

    def fill(self, held: Held, folder: Path) -> str:
        """Fills `folder`; the dataset's digest."""
        totals = total_up(self.data, self.engine, held)
        held, sizes = self._split(held, totals)
        train_sample = take_train_sample(self.engine, held, self.layout.kept, rows=totals.rows)
        self._refuse_constant(held, train_sample)
        ids = collect_ids(self.data, self.engine, held)
        times = [name for name in self.layout.kept if self.layout.kinds[name] == "timestamp"]
        extents = find_extents(self.engine, held, times)
        rows = {name: int(sizes[:, split].sum()) for split, name in enumerate(SPLITS)}
        answer = Answers(self.engine, held)
        with ThreadPoolExecutor(1, thread_name_prefix="beside") as beside:  # for what looks at few rows
            leaks = beside.submit(self._judge_leaks, train_sample, ids, totals)
            plan = self._fit(answer, totals)
            statistics = collect_statistics(plan, answer)
            leaks.result()
            compared = judge_against(self.previous, self.data.checks, rows, statistics)
            warnings = [*totals.warnings, *compared]
            described, lookups = self._describe(plan, totals, rows, folder)
            telling = beside.submit(
                self._tell, folder, described, statistics, train_sample, extents, totals, warnings
            )
            candidates, digests = self._write_rows(held, plan, folder, sizes, totals)
            parts = PartSeals(
                folder, described.splits, plan, self.syncs, digests, threads=self.engine.workers
            )
            with parts as seals:
                made = Made(
                    lookups=list(zip(described.lookups, lookups, strict=True)), derived=described.derived
                )
                golden = choose_golden(self.layout.inputs, plan, made, candidates)
                pq.write_table(golden, folder / GOLDEN)
                page = telling.result()
                digest = seal_dataset(folder, described, plan, lookups, seals.digests)
        write_report(folder, digest, page)
        logger.info(f"dataset {digest[:12]}: {sum(rows.values()):,} rows written")
        return digest

    def _split(self, held: Held, totals: Totals) -> tuple[Held, Sizes]:
        """The pieces with their rows in split order; how many go where. None of the splits is empty."""
        self.progress.begin("divided into splits")
        rule = split_rule(self.data, self.engine, held, totals.rows, totals.classes)
        held = self.engine.then(divide, held, rule, totals.classes)
        counted = self.engine.collect(count_rows, held, totals.labels)
        sizes = np.asarray([sizes for sizes, _ in counted])
        for split, name in enumerate(SPLITS):
            if not sizes[:, split].any():
                reason = f"the {name} split got none of {totals.rows} rows; bring more rows or give it a larger share"
                raise TableEmpty(table=self.data.main, why=reason)
        check_classes(self.data.target, sum(seen for _, seen in counted), totals.classes)
        shown = (f"{name} {sizes[:, split].sum():,}" for split, name in enumerate(SPLITS))
        logger.info(f"{', '.join(shown)} rows")
        return held, sizes

    def _refuse_constant(self, held: Held, train_sample: TrainSample) -> None:
        """Looks at all training rows only where a sample of them makes it likely that a regression's target never
        changes."""
        sample = train_sample.target.reshape(len(train_sample.target), -1)
        varied = len(sample) and (sample != sample[:1]).any(axis=0).all()
        if self.data.target.task == "regression" and not varied:
            found = [ends for ends in self.engine.collect(target_ends, held) if ends is not None]
            low, high = (
                np.min([ends[0] for ends in found], axis=0),
                np.max([ends[1] for ends in found], axis=0),
            )
            check_varies(self.data.target, np.stack([low, high]))

    def _judge_leaks(self, train_sample: TrainSample, ids: Sequence[Ids], totals: Totals) -> None:
        without = totals.dropped["null_target"]
        judge_leaks(
            self.data, self.layout.kept, train_sample, ids, unknown=totals.unknown, without_target=without
        )

    def _fit(self, answer: Answers, totals: Totals) -> FeaturePlan:
        self.progress.begin("measured for the fit")
        plan = FeaturePlan.fit(self.features, self.layout.kinds, answer, classes=len(totals.classes))
        logger.info(f"fitted {len(plan.numeric)} numeric and {len(plan.categorical)} categorical features")
        return plan

    def _write_rows(
        self, held: Held, plan: FeaturePlan, folder: Path, sizes: Sizes, totals: Totals
    ) -> tuple[list[Candidates], FileDigests]:
        self.progress.begin("made into features and written")
        starts = (np.cumsum(sizes, axis=0) - sizes).tolist()
        shared = (plan, str(folder), self.layout.inputs, totals.labels)
        written = self.engine.collect(write_piece, held, *shared, each=starts)
        candidates = [each.candidates for each in written if each.candidates is not None]
        return candidates, {file: digest for each in written for file, digest in each.digests.items()}

    def _describe(
        self, plan: FeaturePlan, totals: Totals, rows: Mapping[str, int], folder: Path
    ) -> tuple[DatasetDescription, list[pa.Table]]:
        """The description, without a digest; and the tables that the model looks things up in, which are written."""
        gap = {"gap": totals.rows - sum(rows.values())} if self.data.split.gap else {}
        lookups = [
            write_lookup(join, self.layout.kinds, folder)
            for join in self.joins
            if join.layout in self.layout.lookups
        ]
        described = DatasetDescription(
            task=self.data.target.task,
            target=self.data.target.expression,
            targets=self.data.target.names,
            numeric=plan.numeric,
            categorical=plan.categorical,
            classes=tuple(str(each) for each in totals.classes) or None,
            splits={
                name: SplitDescription(rows=count, parts=count_parts(count)) for name, count in rows.items()
            },
            inputs=self.layout.inputs,
            lookups=tuple(lookup for lookup, _ in lookups),
            sources=tuple(replace(file, declared=()) for file in self.files()),
            digest="",
            dropped=totals.dropped | gap,
            derived=tuple(
                DerivedDescription(name=each.name, expression=each.text, kinds=dict(each.expression.kinds))
                for each in self.layout.derived
                if each.served
            ),
            split_kind=self.data.split_kind,
        )
        return described, [table for _, table in lookups]

    def _tell(
        self,
        folder: Path,
        description: DatasetDescription,
        statistics: Mapping[str, ColumnStatistics],
        train_sample: TrainSample,
        extents: Mapping[str, Extent | None],
        totals: Totals,
        warnings: Sequence[str],
    ) -> str:
        """Writes what is known of the columns; the report's page, which lacks the digest."""
        write_statistics(folder / STATISTICS, statistics)
        write_freshness(folder, totals.newest)
        label = {"binary": 1, "multiclass": 0, "regression": None}[self.data.target.task]
        report = Report(
            description=description,
            statistics=statistics,
            bins=relate_to_target(train_sample, statistics, extents, label),
            kinds=self.layout.kinds,
            sources={name: self.data.source_of(name) for name in self.layout.kept},
            shown=_shown_target(self.data.target, totals.classes),
            share=train_sample.share,
            warnings=warnings,
        )
        return render(report)


def _shown_target(target: TargetSpec, classes: Sequence[Class]) -> str:
    """What the page draws of the target: of several classes, the first."""
    if target.task == "regression":
        return f"the mean of {next(iter(target.each.values()))}"
    return f"the share of {next(iter(target.each.values()))}" + (f" = {classes[0]}" if classes else "")


class Answers:
    """Caches answers, so that statistics cost no further pass over the rows. Where a column's values are all known with
    their counts, it computes whatever depends on these alone without a pass too."""

    def __init__(self, engine: Engine, held: Held) -> None:
        self._engine = engine
        self._held = held
        self._known: dict[Aggregate, Any] = {}
        self._counted: dict[str, Counted] = {}

    def __call__(self, aggregates: tuple[Aggregate, ...]) -> list[Any]:
        new = tuple(aggregate for aggregate in dict.fromkeys(aggregates) if aggregate not in self._known)
        asked = tuple(aggregate for aggregate in new if counted_column(aggregate) not in self._counted)
        if asked:
            merged = self._engine.reduce(measure, Merge(asked), self._held, asked)
            for aggregate, answer in zip(asked, merged, strict=True):
                column = counted_column(aggregate)
                if isinstance(answer, Counted) and column is not None:
                    self._counted[column] = answer
                else:
                    self._known[aggregate] = answer
        for aggregate in new:
            column = counted_column(aggregate)
            if column in self._counted:
                self._known[aggregate] = answer_counted(aggregate, self._counted[column])
        return [self._known[aggregate] for aggregate in aggregates]


@gpu_aware
def measure(divided: Divided, aggregates: tuple[Aggregate, ...]) -> list[Any]:
    """What the aggregates ask, of this piece's training rows."""
    train = divided.span(0)
    used = dict.fromkeys(name for aggregate in aggregates for name in aggregate.columns)
    sample = Sample(
        columns={name: divided.columns[name][train] for name in used},
        fold_ids=divided.fold_ids[train],
        target=first_target(divided.target[train]),
        training=train.stop,
    )
    only_host = [aggregate for aggregate in aggregates if not getattr(aggregate, "on_gpu", False)]
    there = to_host(sample) if only_host else sample
    return [
        measure_sample(aggregate, there if aggregate in only_host else sample) for aggregate in aggregates
    ]


@dataclass(frozen=True, slots=True)
class Merge:
    """Merges what two pieces measured, one aggregate at a time."""

    aggregates: tuple[Aggregate, ...]

    def __call__(self, left: list[Any], right: list[Any]) -> list[Any]:
        return [
            merge_answers(aggregate, one, other)
            for aggregate, one, other in zip(self.aggregates, left, right, strict=True)
        ]


def collect_statistics(plan: FeaturePlan, answer: Answer) -> dict[str, ColumnStatistics]:
    """One entry per column that features are made of; a time has none yet."""
    aggregates: dict[str, Aggregate] = {}
    kinds: Mapping[str, Kind] = plan.columns
    as_numbers = plan.number_columns
    for name, kind in kinds.items():
        if kind == "float" or name in as_numbers:
            aggregates[name] = HighBits(Numbers(column=name, kind=kind))
        elif kind != "timestamp":
            aggregates[name] = ValueCounts(name)
    answers: Sequence[object] = answer(tuple(aggregates.values())) if aggregates else ()
    found: dict[str, ColumnStatistics] = {}
    for name, counted in zip(aggregates, answers, strict=True):
        if isinstance(counted, ValueTable):
            found[name] = _categories(counted, kinds[name])
        else:
            assert isinstance(counted, np.ndarray)
            found[name] = _numbers(counted, kinds[name])
    return found


def _numbers(upper: Counts, kind: Kind) -> NumberStatistics:
    used, ends = order_of_values(upper)
    wanted = np.arange(1, _BINS + 1) * (int(ends[-1]) / _BINS)
    last = np.unique(np.minimum(np.searchsorted(ends, wanted), len(used) - 1))
    return NumberStatistics(
        kind=kind,
        rows=int(upper.sum()),
        nulls=count_nulls(upper),
        edges=tuple(_lower_edges(np.concatenate([used[:1], used[last] + 1]))),
        counts=tuple(np.diff(ends[last], prepend=0).tolist()),
    )


def _lower_edges(keys: npt.NDArray[np.int64]) -> list[float]:
    """The smallest values whose sort keys start with these 16 bits."""
    bits = np.where(keys & 0x8000, (keys ^ 0x8000) << 16, (0xFFFF - keys) << 16 | 0xFFFF)
    values = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isfinite(values), values, np.finfo(np.float32).max).tolist()  # type: ignore[no-any-return]


def _categories(table: ValueTable, kind: Kind) -> CategoryStatistics:
    order = table.commonest_first(_COMMONEST)
    total = int(table.counts.sum())
    shown = table.counts[order]
    return CategoryStatistics(
        kind=kind,
        rows=total + table.nulls,
        nulls=table.nulls,
        distinct=len(table.values),
        values=tuple(table.values.take(pa.array(order)).to_pylist()),
        counts=tuple(int(count) for count in shown),
        others=total - int(shown.sum()),
    )
