"""The last files of a dataset: its lookup tables, the headers and digests of its parts, its description."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.etl.engines.device import FileDigests
from serin.etl.relational.relation import LoadedJoin
from serin.features.plan import FeaturePlan
from serin.formats.dataset import (
    FEATURES,
    DatasetDescription,
    LookupDescription,
    SplitDescription,
    write_dataset,
)
from serin.formats.schema import DTYPE_OF_KIND, Kind
from serin.formats.shards import FILES, HEADER, digest_part_file, part_files, part_folder, seal_part
from serin.machine.documents import canonical
from serin.machine.durable import Syncs


class PartSeals:
    """Computes digests of the files of all parts in the background until `digests` is called, which writes the headers;
    `syncs` brings all files of the parts to the disk. Use it as a context manager. `known`: digests of beginnings of
    files, which are not computed again where these are whole."""

    def __init__(
        self,
        folder: Path,
        splits: Mapping[str, SplitDescription],
        plan: FeaturePlan,
        syncs: Syncs,
        known: FileDigests,
        *,
        threads: int,
    ) -> None:
        categorical = [output.name for output in plan.categorical]
        self._names = plan.numeric, categorical, list(plan.approximate)
        self._syncs = syncs
        self._known = known
        self._parts = [
            (folder / name, index, split.rows)
            for name, split in splits.items()
            for index in range(split.parts)
        ]
        for split, index, _ in self._parts:
            for file in part_files(split, index):
                syncs.add(file)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="digest")
        self._digests = {
            (split, index, name): self._threads.submit(self._digest, split, index, rows, name)
            for name in FILES  # the largest of all parts first
            for split, index, rows in self._parts
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def digests(self) -> list[str]:
        """One per part, in order, when all headers are written."""
        return [self._seal(*part) for part in self._parts]

    def _digest(self, split: Path, index: int, rows: int, name: str) -> bytes:
        file = part_folder(split, index) / name
        size, digest = self._known.get(file, (-1, b""))
        if size == file.stat().st_size:
            return digest
        numeric, _, approximate = self._names
        return digest_part_file(split, index, rows, name, numeric, approximate)

    def _seal(self, split: Path, index: int, rows: int) -> str:
        digests = [self._digests[split, index, name].result() for name in FILES]
        digest = seal_part(split, index, rows, *self._names, digests)
        folder = part_folder(split, index)
        self._syncs.add(folder / HEADER, folder)  # the folder: the names of all its files
        return digest


def seal_dataset(
    folder: Path,
    description: DatasetDescription,
    plan: FeaturePlan,
    lookups: Sequence[pa.Table],
    parts: Callable[[], Sequence[str]],
) -> str:
    """Finishes the folder, dataset.json last; the digest over all that is promised to be equal everywhere (class A).
    `parts`: waits for the digests of the parts, and is called when everything else is done."""
    described = description.to_json()
    document = {
        "dataset": {key: value for key, value in described.items() if key not in ("digest", "sources")},
        "features": plan.to_json(exact_only=True),
        "lookups": [_table_digest(table) for table in lookups],
    }
    features = json.dumps(plan.to_json(), allow_nan=False, ensure_ascii=False)
    (folder / FEATURES).write_text(features + "\n", encoding="utf-8")
    digest = hashlib.sha256(canonical({**document, "parts": list(parts())})).hexdigest()
    write_dataset(folder, replace(description, digest=digest))
    return digest


def _table_digest(table: pa.Table) -> str:
    """Of the values, however Arrow happens to lay them out."""
    digest = hashlib.sha256()
    for name in table.column_names:
        column = table.column(name)
        digest.update(canonical([name, str(column.type), column.to_pylist()], default=str))
    return digest.hexdigest()


def write_lookup(
    join: LoadedJoin, kinds: Mapping[str, Kind], folder: Path
) -> tuple[LookupDescription, pa.Table]:
    """Puts the table into the dataset's folder. Rows without a key are left out: no request finds them."""
    spec = join.layout.spec
    key = spec.here[0]
    assert join.index is not None, "a lookup is not an as-of join"
    columns = {key: join.index.keys[0]} | dict(join.columns)
    present = np.flatnonzero(~columns[key].null)
    table = pa.table({name: _plain(column[present].to_arrow()) for name, column in columns.items()})
    file = f"lookups/{spec.table}.parquet"
    (folder / "lookups").mkdir(exist_ok=True)
    pq.write_table(table, folder / file)
    dtypes = {name: DTYPE_OF_KIND[kinds[name]] for name in join.columns}
    return LookupDescription(name=spec.table, key=key, columns=dtypes, file=file), table


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values
