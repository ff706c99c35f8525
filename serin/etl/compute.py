"""Computes a dataset: open the tables, bind the spec to their columns, prepare the pieces of the main table
(`relational/prepare.py`), and turn them into a dataset (`dataset/assemble.py`).

`engines/attempts.py` repeats the last two steps, with smaller pieces or on another engine, when memory runs out.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from serin.etl.binding.layout import Layout, lay_out
from serin.etl.dataset.assemble import Assembly
from serin.etl.dataset.compare import family_key, find_previous
from serin.etl.engines.attempts import run_within_memory
from serin.etl.engines.engine import Engine
from serin.etl.engines.progress import Progress
from serin.etl.identity import files_of
from serin.etl.relational.piece_cache import PieceCache
from serin.etl.relational.prepare import Preparation, prepare_pieces
from serin.etl.sources.file_cache import FileCache
from serin.etl.sources.find import Sources
from serin.etl.sources.tables import Piece, Table, open_table
from serin.formats.windows import HISTORY, write_windows
from serin.machine.durable import Syncs
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.features import FeatureSpec
from serin.store.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The arguments of `build_dataset`, and the folder with what builds keep."""

    data: DataSpec
    features: Sequence[FeatureSpec]
    etl: EtlSpec
    store: Store
    kept: Path
    name: str
    piece_rows: int | None
    fresh: bool

    @property
    def family(self) -> str:
        return family_key(self.name, self.data)

    @property
    def is_known(self) -> bool:
        """Whether there was an earlier build of this pipeline."""
        return self.store.knows_dataset(self.family)


def compute(
    build: Build,
    sources: Sources,
    hashed: Callable[[], Sources],
    syncs: Syncs,
    scratch: Path,
    result: Path,
) -> str:
    """Fills the folder `result`, which is on the disk when `syncs` has nothing left to do. Returns the digest."""
    data, features = build.data, build.features
    tables = _open_tables(build, sources, scratch)
    layout = lay_out(data, features, tables)
    main = tables[data.main]
    _log_tables(main, layout)
    cache = _piece_cache(build, layout, sources)
    previous = find_previous(build.store, build.name, data)
    work = Preparation(
        data=data, features=features, layout=layout, tables=tables, scratch=scratch, cache=cache
    )

    def fill(engine: Engine, pieces: Sequence[Piece], rows: int) -> str:
        """One attempt. Called again, with smaller pieces or another engine, when memory runs out."""
        syncs.drop()
        shutil.rmtree(result)  # of an attempt that ran out of memory
        result.mkdir()
        engine.tell = progress = Progress()
        progress.begin("read and joined")
        held, joins = prepare_pieces(work, engine, pieces, rows=rows)
        digest = Assembly(
            data=data,
            features=features,
            layout=layout,
            joins=joins,
            files=lambda: files_of(hashed()),
            previous=previous,
            engine=engine,
            progress=progress,
            syncs=syncs,
        ).fill(held, result)
        return _with_windows(digest, layout, scratch, result)

    return run_within_memory(
        fill,
        table=main,
        layout=layout,
        etl=build.etl,
        data_bytes=sum(file.size for file in files_of(sources)),
        scratch=scratch,
        piece_rows=build.piece_rows,
    )


def _log_tables(main: Table, layout: Layout) -> None:
    partners = "".join(f", joined with {join.spec.table}" for join in layout.joins)
    logger.info(f"{main.rows:,} rows in {main.name}{partners}")


def _with_windows(digest: str, layout: Layout, scratch: Path, result: Path) -> str:
    """Adds to a dataset how its windows are served, and the history that the export replays; returns its digest."""
    if layout.online is not None:
        write_windows(result, layout.online)
        shutil.copytree(scratch / HISTORY, result / HISTORY)
    return digest


def _open_tables(build: Build, sources: Sources, scratch: Path) -> dict[str, Table]:
    converted = FileCache(build.kept, again=build.fresh)
    tables = {name: open_table(name, files, scratch, converted) for name, files in sources.items()}
    if converted.found:
        requested = converted.found + converted.made
        logger.info(f"{converted.found} of {requested} files to convert were found in the cache")
    return tables


def _piece_cache(build: Build, layout: Layout, sources: Sources) -> PieceCache | None:
    """Pieces kept for the next build. Only from the second build on, and for tables of several files: they grow."""
    data = build.data
    reliable = all(file.content for file in files_of(sources))
    if not reliable or len(sources[data.main]) < 2 or not build.is_known:
        return None
    partners = [file for name, files in sources.items() if name != data.main for file in files]
    return PieceCache.of(build.kept, build.family, data, layout, partners, again=build.fresh)
