"""From tables to a published dataset: read, join, split, fit on the training rows, transform, write.

`build_dataset` finds or publishes; `compute.py` does the work between, and `identity.py` says what decides a dataset.
The rooms, in the order of the work: `sources/` (files and tables), `binding/` (columns of the spec), `relational/` (the
rows of each piece), `dataset/` (split, fit, write), on one of the `engines/`. The same spec and files give the same
bits, whatever engine and pieces.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from serin.etl.compute import Build, compute
from serin.etl.identity import current_key, dataset_key, edition_of, files_of, find_sources, reliable
from serin.etl.relational.checks import judge_freshness
from serin.etl.sources.file_cache import digests_in
from serin.etl.sources.find import SQL, Sources, computed_beside, find_again, find_settled
from serin.etl.sources.tables import refuse_changed
from serin.formats.shards import part_paths
from serin.machine.durable import Syncs
from serin.machine.stopping import check_stopped
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.store.artifacts import Dataset
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
        build = Build(
            data=data, features=features, etl=etl, store=store, kept=kept, name=name, piece_rows=piece_rows,
            fresh=fresh,
        )  # fmt: skip
        return _build_if_new(build) or _find_or_build(build)


def find_dataset(data: DataSpec, features: Sequence[FeatureSpec], store: Store) -> Dataset | None:
    """The dataset made from the same files by the same rules, if there is one. Checks that it is still fresh."""
    return _find(current_key(data, features, store), data, store)


def _find(key: str | None, data: DataSpec, store: Store) -> Dataset | None:
    dataset = None if key is None else store.find_dataset(key)
    if dataset is not None:
        judge_freshness(data.checks, Path(dataset.path))
    return dataset


def _build_if_new(build: Build) -> Dataset | None:
    """Builds where no earlier dataset can be the one, and computes the digests of the tables' files beside that. None
    where they have to be known first."""
    settled = None if build.is_known else find_settled(build.data.tables)
    if settled is None:
        return None
    sources, unchanged = settled
    if not build.fresh and build.store.knows_dataset(_likeness(build, sources)):
        return None
    with computed_beside(lambda: find_sources(build.data, build.store, rows=build.kept / SQL)) as hashed:
        return _compute_and_publish(build, sources, hashed, unchanged=unchanged)


def _find_or_build(build: Build) -> Dataset:
    sources = find_sources(build.data, build.store, rows=build.kept / SQL)
    files = files_of(sources)
    unknown = [file.path for file in files if not file.content]
    if unknown:
        logger.info(
            f"no reliable digest of {unknown[0]} (of {len(unknown)} files): the dataset is built every time"
        )
    key = None if build.fresh else reliable(dataset_key(build.data, build.features, files), files)
    dataset = _find(key, build.data, build.store)
    if dataset is not None:
        logger.info(f"dataset {dataset.digest[:12]} is there already, from the same spec and files")
        return dataset
    built = _compute_and_publish(build, sources, lambda: sources, unchanged=lambda: True)
    assert built is not None, "nothing else can make it None"
    return built


def _compute_and_publish(
    build: Build, sources: Sources, hashed: Callable[[], Sources], *, unchanged: Callable[[], bool]
) -> Dataset | None:
    """`hashed`: waits for the sources with their digests. None when the files are not `unchanged` since they were
    found."""
    data, store = build.data, build.store
    with store.workspace() as folder, Syncs() as syncs:
        scratch, result = folder / "scratch", folder / "dataset"
        scratch.mkdir()
        result.mkdir()
        digest = compute(build, sources, hashed, syncs, scratch, result)
        files = files_of(hashed())
        rows, digests = build.kept / SQL, digests_in(build.kept)
        now = [find_again(name, table, files, rows, digests) for name, table in data.tables.items()]
        refuse_changed(files, [file for found in now for file in found])
        if not unchanged():
            logger.info("a file was touched while it was read: building again")
            return None
        key = dataset_key(data, build.features, files)
        edition = edition_of(digest, key, files)
        check_stopped()
        syncs.wait()
        lookup = reliable(key, files) or secrets.token_hex(32)  # a random key is never looked up
        published = store.publish_dataset(lookup, edition, result, lasting=set(part_paths(result)))
        for another in (build.family, _likeness(build, sources)):
            store.remember_dataset(another, edition)
        return published


def _likeness(build: Build, sources: Sources) -> str:
    return dataset_key(build.data, build.features, files_of(sources), content=False).digest
