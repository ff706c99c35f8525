"""Chooses how the pieces of the main table are prepared: read, joined, filtered and given their target.

- Usually each piece is prepared by itself on the CPU: `relation.prepare`, or what an earlier build kept of it.
- An engine with a GPU prepares batches of pieces there: `gpu.py`.
- De-duplication, windows and joins with tables larger than memory need rows of several pieces: `across_pieces/`.

The result does not depend on the choice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from serin.etl.binding.layout import JoinLayout, Layout
from serin.etl.engines.device import host_columns, to_gpu
from serin.etl.engines.engine import Engine, Held
from serin.etl.engines.memory_budget import partner_bytes, shared_budget
from serin.etl.relational.across_pieces.global_pass import finish_with_global_pass
from serin.etl.relational.across_pieces.large_joins import Join, hold_related, partition_join
from serin.etl.relational.gpu import gpu_batches, host_parts, prepare_on_gpu, relate_on_gpu
from serin.etl.relational.piece_cache import PieceCache, prepare_or_find, relate_or_find
from serin.etl.relational.relation import LoadedJoin, finish, load_join, prepare, relate
from serin.etl.sources.tables import Piece, Table
from serin.machine.hardware import core_count
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preparation:
    """What is to be prepared. `cache`: pieces of earlier builds; None: pieces are neither looked up nor kept."""

    data: DataSpec
    features: Sequence[FeatureSpec]
    layout: Layout
    tables: Mapping[str, Table]
    scratch: Path
    cache: PieceCache | None = None

    @property
    def compares_rows(self) -> bool:
        """Whether a row depends on other rows of the main table."""
        return self.data.unique is not None or bool(self.layout.windows)


def prepare_pieces(
    work: Preparation, engine: Engine, pieces: Sequence[Piece], *, rows: int
) -> tuple[Held, list[LoadedJoin]]:
    """The prepared pieces, held by the engine, on its GPU when it has one; and the joined tables that are in memory.

    `rows`: how many rows a GPU works on at once.
    """
    joins = _load_joins(work, shared_budget(engine.budget_bytes))
    loaded = [join for join in joins if isinstance(join, LoadedJoin)]
    if work.compares_rows or len(loaded) < len(joins):
        held = _prepare_across_pieces(work, engine, pieces, joins, rows)
    elif engine.gpu:
        if own := host_columns(work.features):
            logger.info(f"on the host: your own operators of {', '.join(own)}")
        held = engine.hold(prepare_on_gpu, gpu_batches(pieces, rows), work.data, work.layout, loaded)
    elif work.cache is not None:
        work.cache.log_found(pieces)
        held = engine.hold(prepare_or_find, pieces, work.data, work.layout, loaded, work.cache)
    else:
        held = engine.hold(prepare, pieces, work.data, work.layout, loaded)
    return held, loaded


def _prepare_across_pieces(
    work: Preparation, engine: Engine, pieces: Sequence[Piece], joins: Sequence[Join], rows: int
) -> Held:
    """Runs the joins, then the operations that need rows of several pieces."""
    loaded = [join for join in joins if isinstance(join, LoadedJoin)]
    upload = False
    if len(loaded) < len(joins):
        if engine.gpu:
            logger.info("on the host: relational work, because a joined table is larger than memory")
            pieces, upload = [part for piece in pieces for part in host_parts(piece)], True
        held = hold_related(engine, pieces, work.layout, joins, work.scratch)
    elif engine.gpu:
        held = engine.hold(relate_on_gpu, gpu_batches(pieces, rows), work.layout, loaded)
    elif work.cache is not None:
        work.cache.log_found(pieces)
        held = engine.hold(relate_or_find, pieces, work.layout, loaded, work.cache)
    else:
        held = engine.hold(relate, pieces, work.layout, loaded)
    if work.compares_rows:
        held = finish_with_global_pass(engine, held, pieces, work.data, work.layout, work.scratch)
    else:
        held = engine.then(finish, held, work.data, work.layout)
    return engine.then(to_gpu, held) if upload else held


def _load_joins(work: Preparation, budget_bytes: int) -> list[Join]:
    """The joined tables: in memory those that fit into `budget_bytes`, the others hash-partitioned on disk."""

    def load(join: JoinLayout) -> Join:
        table = work.tables[join.spec.table]
        if partner_bytes(join, table) <= budget_bytes:
            return load_join(join, table)
        lookup = join in work.layout.lookups
        return partition_join(join, table, lookup=lookup, budget_bytes=budget_bytes, scratch=work.scratch)

    joins = work.layout.joins
    together = sum(partner_bytes(join, work.tables[join.spec.table]) for join in joins) <= budget_bytes
    threads = min(len(joins), core_count()) if together else 1
    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="join") as pool:
        return list(pool.map(load, joins))
