"""From tables to a published dataset: read, join, split, fit on the training rows, transform, write.

The same spec and the same files give the same dataset, bit for bit, from every engine and every cut into pieces.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from serin.artifacts import Dataset
from serin.errors import TableEmpty
from serin.etl.attempts import run_with_room
from serin.etl.checks import judge_freshness, write_freshness
from serin.etl.compare import family_key, find_previous, judge_against
from serin.etl.device_read import hold_pieces
from serin.etl.engine import Engine, Held
from serin.etl.golden import Candidates, Made, choose_golden
from serin.etl.layout import DerivedLayout, Layout, lay_out
from serin.etl.leaks import judge_leaks
from serin.etl.progress import Progress
from serin.etl.relate_target import relate_to_target
from serin.etl.relation import LoadedJoin, load_join
from serin.etl.report import Heard, Report, shown_target, write_report
from serin.etl.seal import canonical, seal_dataset
from serin.etl.sources import find_files
from serin.etl.split import split_rule
from serin.etl.statistics import collect_statistics
from serin.etl.tables import Piece, open_table
from serin.etl.target import check_classes
from serin.etl.totals import Totals, total_up
from serin.etl.transform import Merge, count_rows, divide, measure, write_piece
from serin.features.plan import FeaturePlan
from serin.features.requests import Request
from serin.formats.dataset import (
    FORMAT,
    GOLDEN,
    SPLITS,
    STATISTICS,
    VERSION,
    DatasetDescription,
    DerivedDescription,
    LookupDescription,
    SourceFile,
    SplitDescription,
)
from serin.formats.schema import DTYPE_OF_KIND
from serin.formats.shards import count_parts
from serin.formats.statistics import ColumnStatistics, write_statistics
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.spec.stages import EtlSpec
from serin.store import Store

Say = Callable[[str], None]
_FIT_VERSION = 2  # raised when the same inputs would give other numbers than before


def silent(_: str) -> None:
    pass


def build_dataset(
    data: DataSpec,
    features: Sequence[FeatureSpec],
    etl: EtlSpec,
    *,
    store: Store,
    say: Say = silent,
    piece_rows: int | None = None,
) -> Dataset:
    """The dataset of these sections: found when it is there already, else computed and published."""
    sources = _sources(data)
    files = [file for found in sources.values() for file in found]
    key = dataset_key(data, features, files)
    known = store.find_dataset(key)
    if known is not None:
        say(f"dataset {known.digest[:12]} is there already, from the same spec and files")
        judge_freshness(data.checks, Path(known.path), say)
        return known
    with store.workspace() as folder:
        scratch, result = folder / "scratch", folder / "dataset"
        scratch.mkdir()
        result.mkdir()
        tables = {name: open_table(name, found, scratch) for name, found in sources.items()}
        layout = lay_out(data, features, tables)
        joins = [load_join(join, tables[join.spec.table]) for join in layout.joins]
        main = tables[data.main]
        partners = "".join(f", joined with {join.layout.spec.table}" for join in joins)
        say(f"{main.rows:,} rows in {main.name}{partners}")
        previous = find_previous(store, data)
        heard = Heard(say)

        def run(engine: Engine, pieces: Sequence[Piece]) -> str:
            _empty(result)
            engine.tell = progress = Progress(say)
            progress.begin("read and joined")
            held = hold_pieces(engine, pieces, data, features, layout, joins, main, scratch)
            build = _Build(
                data=data,
                features=features,
                layout=layout,
                joins=joins,
                engine=engine,
                say=heard,
                progress=progress,
            )
            return build.run(held, result, files, previous)

        digest = run_with_room(
            run, table=main, layout=layout, etl=etl, scratch=scratch, say=say, piece_rows=piece_rows
        )
        published = store.publish_dataset(key, digest, result)
        store.remember_dataset(family_key(data), digest)
        return published


def find_dataset(data: DataSpec, features: Sequence[FeatureSpec], store: Store) -> Dataset | None:
    """The dataset that was made from the same files by the same rules, when there is one."""
    files = [file for found in _sources(data).values() for file in found]
    return store.find_dataset(dataset_key(data, features, files))


def _sources(data: DataSpec) -> dict[str, tuple[SourceFile, ...]]:
    return {name: find_files(name, url) for name, url in data.tables.items()}


def dataset_key(data: DataSpec, features: Sequence[FeatureSpec], files: Sequence[SourceFile]) -> str:
    """Equal when the same dataset would come out: the two sections, the files as they are, the version of this code."""
    document = {
        "format": [FORMAT, VERSION, _FIT_VERSION],
        "data": data.model_dump(mode="json", by_alias=True),
        "features": [feature.model_dump(mode="json", by_alias=True) for feature in features],
        "operators": [feature.operators for feature in features],
        "files": [[file.table, file.path, file.size, file.modified] for file in files],
    }
    return hashlib.sha256(canonical(document)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Build:
    data: DataSpec
    features: Sequence[FeatureSpec]
    layout: Layout
    joins: Sequence[LoadedJoin]
    engine: Engine
    say: Heard
    progress: Progress

    def run(self, held: Held, folder: Path, files: Sequence[SourceFile], previous: Dataset | None) -> str:
        """Fills `folder`; the dataset's digest."""
        totals = total_up(self.data, self.engine, held, self.say)
        self.progress.begin("divided into splits")
        rule = split_rule(self.data, self.engine, held, totals.rows, totals.classes)
        held = self.engine.then(divide, held, rule, totals.classes)
        sizes = self._sizes(held, totals)
        self._judge_leaks(held, totals)
        rows = {name: int(sizes[:, split].sum()) for split, name in enumerate(SPLITS)}
        self.progress.begin("measured for the fit")
        answer = _Answers(self.engine, held)
        plan = FeaturePlan.fit(self.features, self.layout.kinds, answer, classes=len(totals.classes))
        self.say(f"fitted {len(plan.numeric)} numeric and {len(plan.categorical)} categorical features")
        self.progress.begin("made into features and written")
        candidates = self._write_rows(held, plan, folder, sizes, totals)
        lookups = [
            self._write_lookup(join, folder) for join in self.joins if join.layout in self.layout.lookups
        ]
        derived = tuple(_describe_derived(each) for each in self.layout.derived if each.served)
        made = Made(lookups=lookups, derived=derived)
        golden = choose_golden(self.layout.inputs, plan, made, candidates)
        pq.write_table(golden, folder / GOLDEN)
        statistics = collect_statistics(plan, answer)
        judge_against(previous, self.data.checks, rows, statistics, self.say)
        write_statistics(folder / STATISTICS, statistics)
        write_freshness(folder, totals.newest)
        description = DatasetDescription(
            task=self.data.target.task,
            target=self.data.target.expression,
            numeric=plan.numeric,
            categorical=plan.categorical,
            classes=tuple(str(each) for each in totals.classes) or None,
            splits={
                name: SplitDescription(rows=count, parts=count_parts(count)) for name, count in rows.items()
            },
            inputs=self.layout.inputs,
            lookups=tuple(lookup for lookup, _ in lookups),
            sources=tuple(files),
            digest="",
            dropped=self._dropped(totals, rows),
            derived=derived,
        )
        tables = [table for _, table in lookups]
        digest = seal_dataset(folder, description, plan, tables, threads=self.engine.workers)
        self._write_report(held, folder, replace(description, digest=digest), statistics, totals)
        self.say(f"dataset {digest[:12]}: {sum(rows.values()):,} rows written")
        return digest

    def _write_report(
        self,
        held: Held,
        folder: Path,
        description: DatasetDescription,
        statistics: Mapping[str, ColumnStatistics],
        totals: Totals,
    ) -> None:
        times = [name for name in self.layout.kept if self.layout.kinds[name] == "timestamp"]
        label = {"binary": 1, "multiclass": 0, "regression": None}[self.data.target.task]
        self.progress.begin("held against the target")
        trained = description.rows["train"]
        report = Report(
            description=description,
            statistics=statistics,
            bins=relate_to_target(self.engine, held, statistics, times, label, trained),
            kinds=self.layout.kinds,
            sources={name: self.data.source_of(name) for name in self.layout.kept},
            shown=shown_target(self.data.target, totals.classes),
            warnings=self.say.warnings,
        )
        write_report(folder, report)

    def _judge_leaks(self, held: Held, totals: Totals) -> None:
        missing = totals.dropped["null_target"]
        judge_leaks(
            self.data,
            self.layout.kept,
            self.engine,
            held,
            rows=totals.rows,
            unknown=totals.unknown,
            without_target=missing,
        )

    def _dropped(self, totals: Totals, rows: Mapping[str, int]) -> dict[str, int]:
        gap = {"gap": totals.rows - sum(rows.values())} if self.data.split.gap else {}
        return totals.dropped | gap

    def _sizes(self, held: Held, totals: Totals) -> npt.NDArray[np.int64]:
        """Rows by piece and split."""
        counted = self.engine.collect(count_rows, held, totals.labels)
        sizes = np.asarray([sizes for sizes, _ in counted])
        for split, name in enumerate(SPLITS):
            if not sizes[:, split].any():
                reason = f"the {name} split got none of {totals.rows} rows; bring more rows or give it a larger share"
                raise TableEmpty(table=self.data.main, why=reason)
        check_classes(self.data.target, sum(seen for _, seen in counted), totals.classes)
        self.say(
            ", ".join(f"{name} {sizes[:, split].sum():,}" for split, name in enumerate(SPLITS)) + " rows"
        )
        return sizes

    def _write_rows(
        self, held: Held, plan: FeaturePlan, folder: Path, sizes: npt.NDArray[np.int64], totals: Totals
    ) -> list[Candidates]:
        starts = (np.cumsum(sizes, axis=0) - sizes).tolist()
        shared = (plan, str(folder), self.layout.inputs, totals.labels)
        return self.engine.collect(write_piece, held, *shared, each=starts)

    def _write_lookup(self, join: LoadedJoin, folder: Path) -> tuple[LookupDescription, pa.Table]:
        spec, kinds = join.layout.spec, self.layout.kinds
        key = spec.on[0]
        assert join.index is not None, "a lookup is no as-of join"
        columns = {key: join.index.keys[0]} | dict(join.columns)
        present = np.flatnonzero(~columns[key].null)
        table = pa.table({name: _plain(column[present].to_arrow()) for name, column in columns.items()})
        file = f"lookups/{spec.table}.parquet"
        (folder / "lookups").mkdir(exist_ok=True)
        pq.write_table(table, folder / file)
        dtypes = {name: DTYPE_OF_KIND[kinds[name]] for name in join.columns}
        return LookupDescription(name=spec.table, key=key, columns=dtypes, file=file), table


class _Answers:
    """Answers fits over the held pieces, and remembers, so that statistics can ask again for nothing."""

    def __init__(self, engine: Engine, held: Held) -> None:
        self._engine = engine
        self._held = held
        self._known: dict[Request, Any] = {}

    def __call__(self, requests: tuple[Request, ...]) -> list[Any]:
        new = tuple(request for request in requests if request not in self._known)
        if new:
            merged = self._engine.reduce(measure, Merge(new), self._held, new)
            self._known.update(zip(new, merged, strict=True))
        return [self._known[request] for request in requests]


def _describe_derived(layout: DerivedLayout) -> DerivedDescription:
    return DerivedDescription(name=layout.name, expression=layout.text, kinds=dict(layout.expression.kinds))


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _empty(folder: Path) -> None:
    """What an attempt that ran out of memory has left must not be in the dataset."""
    shutil.rmtree(folder)
    folder.mkdir()
