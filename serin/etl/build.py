"""From tables to a published dataset: read, join, split, fit on the training rows, transform, write.

`build_dataset` finds or publishes; `compute.py` does the work between. Its rooms, in the order of the work: `sources/`
(files and tables), `binding/` (columns of the spec), `relational/` (the rows of each piece), `dataset/` (split, fit,
write), on one of the `engines/`. The same spec and files give the same bits, whatever engine and pieces.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

from serin.etl.compute import Earlier, Wanted, compute
from serin.etl.dataset.compare import family_key, find_previous
from serin.etl.relational.checks import judge_freshness
from serin.etl.sources.file_cache import digests_in
from serin.etl.sources.find import SQL, Sources, computed_beside, find_all_again, find_settled, find_table
from serin.etl.sources.tables import refuse_changed
from serin.formats.canonical import canonical
from serin.formats.dataset import SourceFile
from serin.formats.shards import part_paths
from serin.machine.durable import Syncs
from serin.machine.stopping import check_stopped
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.store.artifacts import Dataset
from serin.store.stage_keys import StageKey, key_of
from serin.store.store import Store

logger = logging.getLogger(__name__)


def build_dataset(
    data: DataSpec,
    features: Sequence[FeatureSpec],
    etl: EtlSpec,
    *,
    store: Store,
    name: str = "",
    piece_rows: int | None = None,
    fresh: bool = False,
) -> Dataset:
    """The dataset of these sections: found when it is there already, else computed and published.

    `name`: of the pipeline; some checks compare with its previous dataset. `fresh`: uses nothing of earlier builds and
    replaces what they kept.
    """
    with store.using_kept() as kept:
        wanted = Wanted(
            data=data, features=features, etl=etl, store=store, kept=kept, name=name, piece_rows=piece_rows,
            fresh=fresh,
        )  # fmt: skip
        return _build_if_new(wanted) or _find_or_build(wanted)


def _build_if_new(wanted: Wanted) -> Dataset | None:
    """Builds where no earlier dataset can be the one, and computes the digests of the tables' files beside that. None
    where they have to be known first."""
    store, family = wanted.store, family_key(wanted.name, wanted.data)
    settled = None if store.knows_dataset(family) else find_settled(wanted.data.tables)
    if settled is None:
        return None
    if not wanted.fresh and store.knows_dataset(_likeness(wanted, settled.sources)):
        return None
    with computed_beside(lambda: _sources(wanted.data, wanted.store, rows=wanted.kept / SQL)) as hashed:
        return _build(wanted, settled.sources, hashed, unchanged=settled.unchanged)


def _find_or_build(wanted: Wanted) -> Dataset:
    sources = _sources(wanted.data, wanted.store, rows=wanted.kept / SQL)
    files = _files(sources)
    _log_unreliable(files)
    key = _reliable(dataset_key(wanted.data, wanted.features, files), files)
    known = None if wanted.fresh or key is None else wanted.store.find_dataset(key)
    if known is not None:
        logger.info(f"dataset {known.digest[:12]} is there already, from the same spec and files")
        judge_freshness(wanted.data.checks, Path(known.path))
        return known
    built = _build(wanted, sources, lambda: sources, unchanged=lambda: True)
    assert built is not None, "nothing else can make it None"
    return built


def _build(
    wanted: Wanted, sources: Sources, hashed: Callable[[], Sources], *, unchanged: Callable[[], bool]
) -> Dataset | None:
    """Computes and publishes. `hashed`: waits for the sources with their digests. None when the files are not
    `unchanged` since they were found."""
    data, features, store, kept = wanted.data, wanted.features, wanted.store, wanted.kept
    with store.workspace() as folder, Syncs() as syncs:
        scratch, result = folder / "scratch", folder / "dataset"
        scratch.mkdir()
        result.mkdir()
        family = family_key(wanted.name, data)
        earlier = Earlier(
            family=family,
            known=store.knows_dataset(family),
            previous=find_previous(store, wanted.name, data),
            kept=kept,
            fresh=wanted.fresh,
        )
        digest = compute(wanted, sources, hashed, earlier, syncs, scratch, result)
        files = _files(hashed())
        refuse_changed(files, find_all_again(data.tables, files, kept / SQL, digests_in(kept)))
        if not unchanged():
            logger.info("a file was touched while it was read: building again")
            return None
        key = dataset_key(data, features, files)
        edition = _edition(digest, key, files)
        check_stopped()
        syncs.wait()
        lookup = _reliable(key, files) or secrets.token_hex(32)  # a random key is never looked up
        published = store.publish_dataset(lookup, edition, result, lasting=set(part_paths(result)))
        for another in (family, _likeness(wanted, sources)):
            store.remember_dataset(another, edition)
        return published


def _likeness(wanted: Wanted, sources: Sources) -> str:
    return dataset_key(wanted.data, wanted.features, _files(sources), content=False).digest


def _files(sources: Sources) -> list[SourceFile]:
    return [file for found in sources.values() for file in found]


def find_dataset(data: DataSpec, features: Sequence[FeatureSpec], store: Store) -> Dataset | None:
    """The dataset made from the same files by the same rules, if there is one. Checks that it is still fresh."""
    key = current_key(data, features, store)
    known = None if key is None else store.find_dataset(key)
    if known is not None:
        judge_freshness(data.checks, Path(known.path))
    return known


def current_key(data: DataSpec, features: Sequence[FeatureSpec], store: Store) -> str | None:
    """The key of the dataset that the tables would give now; None when a file has no reliable digest: then no earlier
    dataset can be used."""
    files = _files(_sources(data, store))
    return _reliable(dataset_key(data, features, files), files)


def dataset_parts(data: DataSpec, features: Sequence[FeatureSpec], store: Store) -> StageKey:
    """What decides the dataset that the tables would give now, to report what has changed."""
    return dataset_key(data, features, _files(_sources(data, store)))


def _reliable(key: StageKey, files: Sequence[SourceFile]) -> str | None:
    return key.digest if all(file.content for file in files) else None


def _sources(data: DataSpec, store: Store, *, rows: Path | None = None) -> dict[str, tuple[SourceFile, ...]]:
    digests = digests_in(store.kept_folder())
    return {name: find_table(name, table, digests, rows=rows) for name, table in data.tables.items()}


def _log_unreliable(files: Sequence[SourceFile]) -> None:
    unknown = [file.path for file in files if not file.content]
    if unknown:
        logger.info(
            f"no reliable digest of {unknown[0]} (of {len(unknown)} files): the dataset is built every time"
        )


def dataset_key(
    data: DataSpec, features: Sequence[FeatureSpec], files: Sequence[SourceFile], *, content: bool = True
) -> StageKey:
    """What decides a dataset. Without the files' `content` it is the same for all that may have the same key."""
    tables = [[file.table, file.path, file.size, file.content if content else ""] for file in files]
    return key_of(
        "etl",
        data=data,
        features=tuple(features),
        operators=operators_of(features),
        tables=canonical(tables).decode(),
    )


def _edition(digest: str, key: StageKey, files: Sequence[SourceFile]) -> str:
    """The name of a published dataset. Its digest leaves out values that may differ in their last bit; with other code
    or libraries they may differ by more. A dataset of another snapshot has another lineage."""
    made_by = [key.parts[part] for part in ("sources", "versions", "operators")]
    snapshots = {(file.table, *astuple(file.snapshot)) for file in files if file.snapshot is not None}
    return hashlib.sha256(canonical([digest, made_by, sorted(snapshots)])).hexdigest()


def operators_of(features: Sequence[FeatureSpec]) -> str:
    """The user's own operators with the digests of their code."""
    return canonical([feature.operators for feature in features if feature.operators]).decode()
