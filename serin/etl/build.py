"""From tables to a published dataset: read, join, split, fit on the training rows, transform, write.

`build_dataset` finds or publishes; `_compute` does the work in two halves. `relational/prepare.py` chooses how the
pieces of the main table are prepared, `dataset/assemble.py` turns them into a dataset. `engines/attempts.py` calls both
again when memory runs out. The same spec and files give the same dataset, bit for bit, whatever engine and pieces.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from serin.etl.dataset.assemble import Assembly
from serin.etl.dataset.compare import family_key, find_previous
from serin.etl.engines.attempts import run_within_memory
from serin.etl.engines.engine import Engine
from serin.etl.engines.progress import Progress
from serin.etl.relational.checks import judge_freshness
from serin.etl.relational.piece_cache import PieceCache
from serin.etl.relational.prepare import Preparation, prepare_pieces
from serin.etl.sources.file_cache import FileCache, digests_in
from serin.etl.sources.find import SQL, find_all_again, find_table
from serin.etl.sources.late_digests import Sources, computed_beside, find_settled
from serin.etl.sources.layout import Layout, lay_out
from serin.etl.sources.tables import Piece, Table, open_table, refuse_changed
from serin.formats.canonical import canonical
from serin.formats.dataset import FORMAT, VERSION, SourceFile
from serin.formats.shards import part_paths
from serin.machine.durable import Syncs
from serin.machine.stopping import check_stopped
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.store.artifacts import Dataset
from serin.store.stage_keys import StageKey, key_of, made_by, said
from serin.store.store import Store

logger = logging.getLogger(__name__)
_FIT_VERSION = 4  # raised when the same inputs would give other numbers than before


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
        wanted = _Wanted(
            data=data, features=features, etl=etl, store=store, kept=kept, name=name, piece_rows=piece_rows,
            fresh=fresh,
        )  # fmt: skip
        return _build_if_new(wanted) or _find_or_build(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The arguments of `build_dataset`, and the folder with what builds keep."""

    data: DataSpec
    features: Sequence[FeatureSpec]
    etl: EtlSpec
    store: Store
    kept: Path
    name: str
    piece_rows: int | None
    fresh: bool

    def sources(self) -> Sources:
        return _sources(self.data, self.store, rows=self.kept / SQL)


def _build_if_new(wanted: _Wanted) -> Dataset | None:
    """Builds where no earlier dataset can be the one, and computes the digests of the tables' files beside that. None
    where they have to be known first."""
    store, family = wanted.store, family_key(wanted.name, wanted.data)
    settled = None if store.knows_dataset(family) else find_settled(wanted.data.tables)
    if settled is None:
        return None
    if not wanted.fresh and store.knows_dataset(_likeness(wanted, settled.sources)):
        return None
    with computed_beside(wanted.sources) as hashed:
        return _build(wanted, settled.sources, hashed, unchanged=settled.unchanged)


def _find_or_build(wanted: _Wanted) -> Dataset:
    sources = wanted.sources()
    files = _files(sources)
    _log_unreliable(files)
    key = dataset_key(wanted.data, wanted.features, files)
    known = None if wanted.fresh or key is None else wanted.store.find_dataset(key)
    if known is not None:
        logger.info(f"dataset {known.digest[:12]} is there already, from the same spec and files")
        judge_freshness(wanted.data.checks, Path(known.path))
        return known
    built = _build(wanted, sources, lambda: sources, unchanged=lambda: True)
    assert built is not None, "nothing else can make it None"
    return built


def _build(
    wanted: _Wanted, sources: Sources, hashed: Callable[[], Sources], *, unchanged: Callable[[], bool]
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
        digest = _compute(wanted, sources, hashed, earlier, syncs, scratch, result)
        files = _files(hashed())
        refuse_changed(files, find_all_again(data.tables, files, kept / SQL, digests_in(kept)))
        if not unchanged():
            logger.info("a file was touched while it was read: building again")
            return None
        key = dataset_key(data, features, files) or secrets.token_hex(32)  # a random key is never looked up
        edition = _edition(digest, features, files)
        check_stopped()
        syncs.wait()
        published = store.publish_dataset(key, edition, result, lasting=set(part_paths(result)))
        for another in (family, _likeness(wanted, sources)):
            store.remember_dataset(another, edition)
        return published


def _likeness(wanted: _Wanted, sources: Sources) -> str:
    """The same for all datasets that may have the same key: made by the same rules from files of the same sizes."""
    files = [[file.table, file.path, file.size] for file in _files(sources)]
    return hashlib.sha256(canonical({"like": files, **_rules(wanted.data, wanted.features)})).hexdigest()


def _files(sources: Sources) -> list[SourceFile]:
    return [file for found in sources.values() for file in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What earlier builds of this pipeline left: whether there was one (`known`), its last dataset, and the cache
    folder.

    The dataset is None when no check compares with it; a `fresh` build replaces the cache.
    """

    family: str
    known: bool
    previous: Dataset | None
    kept: Path
    fresh: bool = False


def _compute(
    wanted: _Wanted,
    sources: Sources,
    hashed: Callable[[], Sources],
    earlier: Earlier,
    syncs: Syncs,
    scratch: Path,
    result: Path,
) -> str:
    """Fills the folder `result`, which is on the disk when `syncs` has nothing left to do. Returns the digest."""
    data, features = wanted.data, wanted.features
    tables = _open_tables(sources, earlier, scratch)
    layout = lay_out(data, features, tables)
    main = tables[data.main]
    partners = "".join(f", joined with {join.spec.table}" for join in layout.joins)
    logger.info(f"{main.rows:,} rows in {main.name}{partners}")
    cache = _piece_cache(data, layout, sources, earlier)
    work = Preparation(
        data=data, features=features, layout=layout, tables=tables, scratch=scratch, cache=cache
    )

    def fill(engine: Engine, pieces: Sequence[Piece], rows: int) -> str:
        """One attempt. Called again, with smaller pieces or another engine, when memory runs out."""
        syncs.drop()
        _empty(result)
        engine.tell = progress = Progress()
        progress.begin("read and joined")
        held, joins = prepare_pieces(work, engine, pieces, rows=rows)
        return Assembly(
            data=data,
            features=features,
            layout=layout,
            joins=joins,
            files=lambda: _files(hashed()),
            previous=earlier.previous,
            engine=engine,
            progress=progress,
            syncs=syncs,
        ).fill(held, result)

    size = sum(file.size for file in _files(sources))
    return run_within_memory(
        fill,
        table=main,
        layout=layout,
        etl=wanted.etl,
        data_bytes=size,
        scratch=scratch,
        piece_rows=wanted.piece_rows,
    )


def _open_tables(
    sources: Mapping[str, tuple[SourceFile, ...]], earlier: Earlier, scratch: Path
) -> dict[str, Table]:
    converted = FileCache.converted(earlier.kept, again=earlier.fresh)
    tables = {name: open_table(name, found, scratch, converted) for name, found in sources.items()}
    if converted.found:
        asked = converted.found + converted.made
        logger.info(f"{converted.found} of {asked} files to convert were found in the cache")
    return tables


def _piece_cache(
    data: DataSpec, layout: Layout, sources: Mapping[str, tuple[SourceFile, ...]], earlier: Earlier
) -> PieceCache | None:
    """Pieces kept for the next build. Only from the second build on, and for tables of several files: they grow."""
    known = all(file.content for found in sources.values() for file in found)
    if not known or not earlier.known or len(sources[data.main]) < 2:
        return None
    others = [file for name, found in sources.items() if name != data.main for file in found]
    return PieceCache.of(earlier.kept, earlier.family, data, layout, others, again=earlier.fresh)


def find_dataset(data: DataSpec, features: Sequence[FeatureSpec], store: Store) -> Dataset | None:
    """The dataset made from the same files by the same rules, if there is one. Checks that it is still fresh."""
    key = current_key(data, features, store)
    known = None if key is None else store.find_dataset(key)
    if known is not None:
        judge_freshness(data.checks, Path(known.path))
    return known


def current_key(data: DataSpec, features: Sequence[FeatureSpec], store: Store) -> str | None:
    """The key of the dataset that the tables would give now; None when a file has no reliable digest."""
    return dataset_key(data, features, [file for found in _sources(data, store).values() for file in found])


def _sources(data: DataSpec, store: Store, *, rows: Path | None = None) -> dict[str, tuple[SourceFile, ...]]:
    digests = digests_in(store.kept_folder())
    return {name: find_table(name, table, digests, rows=rows) for name, table in data.tables.items()}


def _log_unreliable(files: Sequence[SourceFile]) -> None:
    unknown = [file.path for file in files if not file.content]
    if unknown:
        logger.info(
            f"no reliable digest of {unknown[0]} (of {len(unknown)} files): the dataset is built every time"
        )


def dataset_key(data: DataSpec, features: Sequence[FeatureSpec], files: Sequence[SourceFile]) -> str | None:
    """A digest of everything that decides the dataset: the two sections, the files, Serin's code and the libraries.
    None when a file has no reliable digest: then no earlier dataset can be used."""
    if not all(file.content for file in files):
        return None
    document = {
        "files": [[file.table, file.path, file.size, file.content] for file in files],
        **_rules(data, features),
    }
    return hashlib.sha256(canonical(document)).hexdigest()


def _rules(data: DataSpec, features: Sequence[FeatureSpec]) -> dict[str, Any]:
    """What decides a dataset besides its files."""
    return {
        "format": [FORMAT, VERSION, _FIT_VERSION],
        "data": said(data),
        "features": [said(feature) for feature in features],
        "operators": [feature.operators for feature in features],
        "made_by": made_by("etl"),
    }


def _edition(digest: str, features: Sequence[FeatureSpec], files: Sequence[SourceFile]) -> str:
    """The name of a published dataset. Its digest leaves out values that may differ in their last bit; with other code
    or libraries they may differ by more. A dataset of another snapshot has another lineage."""
    operators = [feature.operators for feature in features]
    snapshots = {(file.table, *astuple(file.snapshot)) for file in files if file.snapshot is not None}
    document = [digest, made_by("etl"), operators, *([sorted(snapshots)] if snapshots else [])]
    return hashlib.sha256(canonical(document)).hexdigest()


def dataset_parts(data: DataSpec, features: Sequence[FeatureSpec], store: Store) -> StageKey:
    """The parts of `dataset_key` by name, to report what has changed."""
    files = [file for found in _sources(data, store).values() for file in found]
    tables = " ".join(f"{file.table} {file.path} {file.size} {file.content}" for file in files)
    return key_of(
        "etl",
        form=_FIT_VERSION,
        data=data,
        features=tuple(features),
        operators=operators_of(features),
        tables=tables,
    )


def operators_of(features: Sequence[FeatureSpec]) -> str:
    """The user's own operators with the digests of their code."""
    return canonical([feature.operators for feature in features if feature.operators]).decode()


def _empty(folder: Path) -> None:
    """Removes the files of an attempt that ran out of memory."""
    shutil.rmtree(folder)
    folder.mkdir()
