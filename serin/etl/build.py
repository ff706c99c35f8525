"""From tables to a published dataset: read, join, split, fit on the training rows, transform, write.

The same spec and the same files give the same dataset, bit for bit, from every engine and every cut into pieces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.artifacts import Dataset
from serin.errors import TableEmpty
from serin.etl.checks import judge_checks
from serin.etl.engine import Engine, Held, open_engine
from serin.etl.golden import choose_golden
from serin.etl.layout import Layout, lay_out
from serin.etl.relation import LoadedJoin, Prepared, load_join, prepare
from serin.etl.sources import find_files
from serin.etl.split import hash_split, time_split
from serin.etl.statistics import collect_statistics
from serin.etl.tables import Table, cut, open_table
from serin.etl.target import Class, check_classes, merge_classes
from serin.etl.transform import Merge, count_rows, divide, measure, write_piece
from serin.features.plan import FeaturePlan
from serin.features.requests import Request
from serin.formats import dataset as format_dataset
from serin.formats.dataset import SPLITS, DatasetDescription, LookupDescription, SourceFile, SplitDescription
from serin.formats.schema import DTYPE_OF_KIND
from serin.formats.shards import count_parts, seal_part
from serin.formats.statistics import write_statistics
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.spec.stages import EtlSpec
from serin.store import Store

Say = Callable[[str], None]
PIECE_ROWS = 2**19
_FIT_VERSION = 1  # raised when the same inputs would give other numbers than before


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
    sources = {name: find_files(name, url) for name, url in data.tables.items()}
    files = [file for found in sources.values() for file in found]
    key = dataset_key(data, features, files)
    known = store.find_dataset(key)
    if known is not None:
        say(f"dataset {known.digest[:12]} is there already, from the same spec and files")
        return known
    with store.workspace() as folder:
        scratch = folder / "scratch"
        scratch.mkdir()
        tables = {name: open_table(name, found, scratch) for name, found in sources.items()}
        layout = lay_out(data, features, tables)
        joins = [load_join(join, tables[join.spec.table]) for join in layout.joins]
        main = tables[data.main]
        say(
            f"{main.rows:,} rows in {main.name}"
            + "".join(f", joined with {join.layout.spec.table}" for join in joins)
        )
        with open_engine(etl, _needed_bytes(main, layout)) as engine:
            rows = piece_rows or max(2**16, min(PIECE_ROWS, -(-main.rows // (2 * engine.workers))))
            held = engine.hold(prepare, cut(main, rows), data, layout, joins)
            built = _Build(data=data, features=features, layout=layout, joins=joins, engine=engine, say=say)
            result = folder / "dataset"
            result.mkdir()
            digest = built.run(held, result, files)
        return store.publish_dataset(key, digest, result)


def dataset_key(data: DataSpec, features: Sequence[FeatureSpec], files: Sequence[SourceFile]) -> str:
    """Equal when the same dataset would come out: the two sections, the files as they are, the version of this code."""
    document = {
        "format": [format_dataset.FORMAT, format_dataset.VERSION, _FIT_VERSION],
        "data": data.model_dump(mode="json", by_alias=True),
        "features": [feature.model_dump(mode="json", by_alias=True) for feature in features],
        "files": [[file.table, file.path, file.size, file.modified] for file in files],
    }
    return hashlib.sha256(_canonical(document)).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Build:
    data: DataSpec
    features: Sequence[FeatureSpec]
    layout: Layout
    joins: Sequence[LoadedJoin]
    engine: Engine
    say: Say

    def run(self, held: Held, folder: Path, files: Sequence[SourceFile]) -> str:
        """Fills `folder`; the dataset's digest."""
        summaries = self.engine.collect(_summary, held)
        judge_checks(self.data.checks, [checks for _, checks, _, _ in summaries])
        total = sum(rows for rows, _, _, _ in summaries)
        dropped = _added([each for _, _, each, _ in summaries])
        if total == 0:
            raise TableEmpty(
                table=self.data.main, why=f"none is left after joins and drops ({_listed(dropped)})"
            )
        if any(dropped.values()):
            self.say(f"{_listed(dropped)}: dropped; {total:,} rows left")
        task = self.data.target.task
        classes = (
            merge_classes(self.data.target, [seen for *_, seen in summaries]) if task == "multiclass" else ()
        )
        held = self._divided(held, total, classes)
        labels = {"binary": 2, "multiclass": len(classes), "regression": 0}[task]
        counted = self.engine.collect(count_rows, held, labels)
        sizes = np.asarray([sizes for sizes, _ in counted])
        rows = {name: int(sizes[:, split].sum()) for split, name in enumerate(SPLITS)}
        self._check_splits(rows, sum(seen for _, seen in counted))
        answer = _Answers(self.engine, held)
        plan = FeaturePlan.fit(self.features, self.layout.kinds, answer)
        self.say(f"fitted {len(plan.numeric)} numeric and {len(plan.categorical)} categorical features")
        starts = np.cumsum(sizes, axis=0) - sizes
        golden_split = max(split for split, name in enumerate(SPLITS) if rows[name])
        candidates = self.engine.collect(
            write_piece,
            held,
            plan,
            str(folder),
            self.layout.inputs,
            golden_split,
            labels,
            each=starts.tolist(),
        )
        lookups = [
            self._write_lookup(join, folder) for join in self.joins if join.layout in self.layout.lookups
        ]
        pq.write_table(
            choose_golden(self.layout.inputs, plan, lookups, candidates), folder / format_dataset.GOLDEN
        )
        write_statistics(folder / format_dataset.STATISTICS, collect_statistics(plan, answer))
        _write_json(folder / format_dataset.FEATURES, plan.to_json())
        description = DatasetDescription(
            task=task,
            target=self.data.target.expression,
            numeric=plan.numeric,
            categorical=plan.categorical,
            classes=tuple(str(each) for each in classes) if classes else None,
            splits={
                name: SplitDescription(rows=count, parts=count_parts(count)) for name, count in rows.items()
            },
            inputs=self.layout.inputs,
            lookups=tuple(description for description, _ in lookups),
            sources=tuple(files),
            digest="",
            dropped=dropped,
        )
        return _seal(
            folder, description, plan, [table for _, table in lookups], self.engine.workers, self.say
        )

    def _divided(self, held: Held, total: int, classes: tuple[Class, ...]) -> Held:
        if self.data.time is None:
            return self.engine.then(divide, held, hash_split(self.data.split), classes)
        rule = time_split(self.data.split, self.engine, held, total)
        return self.engine.then(divide, held, rule, classes)

    def _check_splits(self, rows: dict[str, int], training: Any) -> None:
        for name, count in rows.items():
            if count == 0:
                raise TableEmpty(
                    table=self.data.main,
                    why=f"the {name} split got none of {sum(rows.values())} rows; bring more rows",
                )
        check_classes(self.data.target, training, "training")
        self.say(", ".join(f"{name} {count:,}" for name, count in rows.items()) + " rows")

    def _write_lookup(self, join: LoadedJoin, folder: Path) -> tuple[LookupDescription, pa.Table]:
        spec, kinds = join.layout.spec, self.layout.kinds
        key = spec.on[0]
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


def _summary(prepared: Prepared) -> tuple[int, Any, Any, tuple[Class, ...]]:
    return len(prepared.rows), prepared.checks, prepared.dropped, prepared.target.classes or ()


def _seal(
    folder: Path,
    description: DatasetDescription,
    plan: FeaturePlan,
    lookups: Sequence[pa.Table],
    workers: int,
    say: Say,
) -> str:
    """Writes the parts' headers and dataset.json; the digest over everything of class A."""
    categorical = [output.name for output in plan.categorical]
    parts = [(name, index) for name, split in description.splits.items() for index in range(split.parts)]

    def seal(part: tuple[str, int]) -> str:
        name, index = part
        return seal_part(folder / name, index, description.splits[name].rows, plan.numeric, categorical)

    with ThreadPoolExecutor(workers) as threads:
        digests = list(threads.map(seal, parts))
    content = description.to_json()
    for key in ("digest", "sources"):
        del content[key]
    document = {
        "dataset": content,
        "features": plan.to_json(),
        "lookups": [_table_digest(table) for table in lookups],
        "parts": digests,
    }
    digest = hashlib.sha256(_canonical(document)).hexdigest()
    format_dataset.write_dataset(folder, replace(description, digest=digest))
    say(f"dataset {digest[:12]}: {sum(description.rows.values()):,} rows written")
    return digest


def _table_digest(table: pa.Table) -> str:
    """Of the values, however Arrow happens to lay them out."""
    digest = hashlib.sha256()
    for name in table.column_names:
        column = table.column(name)
        digest.update(_canonical([name, str(column.type), column.to_pylist()], default=str))
    return digest.hexdigest()


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _needed_bytes(table: Table, layout: Layout) -> int:
    width = {"float": 4, "int": 8, "timestamp": 8, "bool": 1, "string": 4}
    used = sum(width[kind] for kind in layout.kinds.values())
    return 3 * used * table.rows  # the columns, their rows in split order, and the features


def _added(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for reason, count in part.items():
            total[reason] = total.get(reason, 0) + count
    return total


def _listed(dropped: dict[str, int]) -> str:
    words = {
        "no_partner": "without a partner",
        "null_target": "without a target",
        "null_time": "without a time",
    }
    return ", ".join(f"{count:,} rows {words[reason]}" for reason, count in dropped.items() if count)


def _write_json(file: Path, document: Any) -> None:
    file.write_text(
        json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _canonical(document: Any, default: Any = None) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), default=default).encode()
