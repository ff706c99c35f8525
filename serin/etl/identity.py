"""What decides a dataset: its key among the results of the stage, and the name it is published under."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from serin.etl.sources.file_cache import digests_in
from serin.etl.sources.find import Sources, find_table
from serin.formats.dataset import SourceFile
from serin.machine.documents import canonical
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec
from serin.store.stage_keys import StageKey, environment_part, key_of
from serin.store.store import Store


def find_sources(data: DataSpec, store: Store, *, rows: Path | None = None) -> Sources:
    """The files of all tables, with their digests. `rows`: see `find_table`."""
    digests = digests_in(store.kept_folder())
    return {name: find_table(name, table, digests, rows=rows) for name, table in data.tables.items()}


def files_of(sources: Sources) -> list[SourceFile]:
    return [file for files in sources.values() for file in files]


def dataset_key(
    data: DataSpec, features: Sequence[FeatureSpec], files: Sequence[SourceFile], *, content: bool = True
) -> StageKey:
    """What decides a dataset. Without the files' `content` it is the same for all that may have the same key."""
    tables = [[file.table, file.path, file.size, file.content if content else ""] for file in files]
    operators = [feature.operators for feature in features if feature.operators]
    return key_of(
        "etl",
        data=_without_serving(data),
        features=tuple(features),
        operators=canonical(operators).decode(),
        tables=canonical(tables).decode(),
        **environment_part(runs_own_code=bool(operators)),
    )


def _without_serving(data: DataSpec) -> DataSpec:
    """The section without what only says how a lookup is refreshed."""
    joins = tuple(join.model_copy(update={"lookup": None}) for join in data.joins)
    return data.model_copy(update={"joins": joins})


def current_key(data: DataSpec, features: Sequence[FeatureSpec], store: Store) -> str | None:
    """The digest of the key of the dataset that the tables would give now; None when it cannot be relied on."""
    files = files_of(find_sources(data, store))
    return reliable(dataset_key(data, features, files), files)


def reliable(key: StageKey, files: Sequence[SourceFile]) -> str | None:
    """The digest of the key; None when a file has no reliable digest: then no earlier dataset can be used."""
    return key.digest if all(file.content for file in files) else None


def edition_of(digest: str, key: StageKey, files: Sequence[SourceFile]) -> str:
    """The name of a published dataset. Its digest leaves out values that may differ in their last bit; with other code
    or libraries they may differ by more. A dataset of another snapshot has another lineage."""
    made_by = [
        key.parts[part] for part in ("sources", "versions", "operators", "environment") if part in key.parts
    ]
    snapshots = {(file.table, *astuple(file.snapshot)) for file in files if file.snapshot is not None}
    return hashlib.sha256(canonical([digest, made_by, sorted(snapshots)])).hexdigest()
