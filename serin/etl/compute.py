"""Computes a dataset: open the tables, bind the spec to their columns, prepare the pieces of the main table
(`relational/prepare.py`), and turn them into a dataset (`dataset/assemble.py`).

`engines/attempts.py` repeats the last two steps, with smaller pieces or on another engine, when memory runs out.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serin.etl.binding.layout import Layout, lay_out
from serin.etl.dataset.assemble import Assembly
from serin.etl.engines.attempts import run_within_memory
from serin.etl.engines.engine import Engine
from serin.etl.engines.progress import Progress
from serin.etl.relational.piece_cache import PieceCache
from serin.etl.relational.prepare import Preparation, prepare_pieces
from serin.etl.sources.file_cache import FileCache
from serin.etl.sources.find import Sources
from serin.etl.sources.tables import Piece, Table, open_table
from serin.formats.dataset import SourceFile
from serin.machine.durable import Syncs
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.store.artifacts import Dataset
from serin.store.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The arguments of `build_dataset`, and the folder with what builds keep."""

    data: DataSpec
    features: Sequence[FeatureSpec]
    etl: EtlSpec
    store: Store
    kept: Path
    name: str
    piece_rows: int | None
    fresh: bool


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


def compute(
    wanted: Wanted,
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
            files=lambda: [file for found in hashed().values() for file in found],
            previous=earlier.previous,
            engine=engine,
            progress=progress,
            syncs=syncs,
        ).fill(held, result)

    size = sum(file.size for found in sources.values() for file in found)
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


def _empty(folder: Path) -> None:
    """Removes the files of an attempt that ran out of memory."""
    shutil.rmtree(folder)
    folder.mkdir()
