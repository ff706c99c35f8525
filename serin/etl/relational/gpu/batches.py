"""Prepares pieces on a GPU, in batches: read there, joined, filtered and given their target there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from serin.etl.engines.device import host_columns
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.gpu.reader import read_on_gpu
from serin.etl.relational.relation import LoadedJoin, Prepared, finish, relate_columns
from serin.etl.sources.layout import Layout
from serin.etl.sources.tables import Piece
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBatch:
    """Neighbouring pieces, of one file or of several, that a GPU works on as one."""

    pieces: tuple[Piece, ...]

    @property
    def first_row(self) -> int:
        return self.pieces[0].first_row

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


def gpu_batches(pieces: Sequence[Piece], rows: int) -> list[GpuBatch]:
    """The pieces, in order, in batches of at most `rows` rows; a piece is never cut."""
    batches: list[list[Piece]] = []
    for piece in pieces:
        if batches and sum(each.rows for each in batches[-1]) + piece.rows <= rows:
            batches[-1].append(piece)
        else:
            batches.append([piece])
    return [GpuBatch(pieces=tuple(own)) for own in batches]


def hold_on_gpu(
    engine: Engine,
    pieces: Sequence[Piece],
    rows: int,
    data: DataSpec,
    features: Sequence[FeatureSpec],
    layout: Layout,
    joins: Sequence[LoadedJoin],
) -> Held:
    """The prepared pieces on the engine's GPUs, in batches of at most `rows` rows."""
    for note in _host_work(features, layout):
        logger.info(f"on the host: {note}")
    return engine.hold(prepare_on_gpu, gpu_batches(pieces, rows), data, layout, joins)


def prepare_on_gpu(batch: GpuBatch, data: DataSpec, layout: Layout, joins: Sequence[LoadedJoin]) -> Prepared:
    """The result of `prepare` for the pieces, on the GPU; MemoryError when it is too small for them."""
    import cupy

    columns = read_on_gpu(batch.pieces, layout.reads)
    rows = cupy.arange(batch.first_row, batch.first_row + batch.rows, dtype=np.int64)
    return finish(relate_columns(columns, rows, layout, joins), data, layout)


def _host_work(features: Sequence[FeatureSpec], layout: Layout) -> Iterator[str]:
    """What the host does although the rows are on a GPU."""
    own = host_columns(features)
    if own:
        yield f"your own operators of {', '.join(own)}"
    as_of = [join.spec.table for join in layout.joins if join.time is not None]
    if as_of:
        yield f"finding the rows of {', '.join(as_of)} as of a time"
