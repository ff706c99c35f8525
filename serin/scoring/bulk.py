"""Scores a whole table without a server: Dask maps the bundle's own graph over pieces of the files, in order.

The answers are those of ONNX Runtime in one process at the same batch size, bit for bit on a CPU, with any number of
workers: a piece is a row group (Parquet) or a file, and each is scored by itself in batches of `predict.BATCH_ROWS`. On
a GPU the workers read pieces and compute features beside the network, which runs there for one batch after the other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import dask
import pyarrow as pa

from serin.errors import EngineFailed, RowsUnfit
from serin.formats.bundle import read_manifest
from serin.formats.rows import RowWriter
from serin.scoring.parts import Parts, Piece, find_pieces, open_parts, plan_digest, read_piece
from serin.scoring.predict import Place, Scorer
from serin.store.store import Store

__all__ = ["Piece", "find_pieces", "score_into_folder", "score_piece", "score_pieces"]

logger = logging.getLogger(__name__)

_WAVE = 4  # pieces per worker that may wait to be written
_CONNECT_S = 5

_dask: Any = dask  # it has no types
_opening = threading.Lock()


def score_pieces(
    bundle: Path,
    pieces: Sequence[Piece],
    writer: RowWriter,
    *,
    workers: int,
    scheduler: str | None = None,
    place: Place = "cpu",
    digest: str | None = None,
) -> int:
    """Scores into one writer, rows in the order of the pieces, a few pieces in memory at a time. Workers use a version
    only with the manifest of `digest`, whose signature was checked here. Returns the number of rows."""
    done, digest = 0, digest or read_manifest(bundle).digest
    with _engine(workers, scheduler) as compute:
        for at in range(0, len(pieces), _WAVE * workers):
            wave = [
                _dask.delayed(score_piece)(str(bundle), piece, place, digest)
                for piece in pieces[at : at + _WAVE * workers]
            ]
            for table in compute(wave):
                writer.write_table(table)
                done += len(table)
            logger.info(f"scored {done:,} rows")
    if not done:
        raise RowsUnfit(column="", reason="has no rows")
    return done


def score_into_folder(
    bundle: Path,
    pieces: Sequence[Piece],
    out: Path | str,
    *,
    workers: int,
    scheduler: str | None = None,
    place: Place = "cpu",
    digest: str | None = None,
    check: Callable[[Parts, int, int], bytes] | None = None,
) -> int:
    """Writes a Parquet file for each piece where it was scored; `out`: a folder, or a URL. A run that was killed is
    completed by the next one with the same rows and version. `digest`: as in `score_pieces`. `check`: is given the
    parts, their rows and how many of them were there already, before the result appears; what it returns is the content
    of `_SUCCESS`. Returns the number of rows."""
    digest = digest or read_manifest(bundle).digest
    with open_parts(str(out), plan_digest(digest, place, pieces)) as parts:
        known = {number: parts.rows(number) for number in range(len(pieces))}
        kept = {number: rows for number, rows in known.items() if rows is not None}
        if kept:
            logger.info(f"{len(kept):,} of {len(pieces):,} parts are there already")
        with _engine(workers, scheduler) as compute:
            tasks = [
                _dask.delayed(write_piece)(str(bundle), piece, number, parts, place, digest)
                for number, piece in enumerate(pieces)
                if number not in kept
            ]
            before = sum(kept.values())
            done = before + sum(int(count) for count in compute(tasks))
        parts.finish(check(parts, done, before) if check else None)
    logger.info(f"scored {done:,} rows")
    return done


def score_piece(bundle: str, piece: Piece, place: Place = "cpu", digest: str | None = None) -> pa.Table:
    """Scores one piece on a worker, which keeps the verified bundle open for the next."""
    bundle = _bundle_here(bundle)
    with _opening:  # once, although all threads begin at the same time
        scorer = _scorer(bundle, place, digest)
    return pa.concat_tables([scorer.score(rows) for rows in read_piece(piece, scorer.schema, Path(bundle))])


def write_piece(bundle: str, piece: Piece, number: int, parts: Parts, place: Place, digest: str) -> int:
    """Scores one piece into its part. Returns the number of rows."""
    table = score_piece(bundle, piece, place, digest)
    parts.write(number, table)
    return len(table)


@lru_cache(maxsize=4)
def _bundle_here(bundle: str) -> str:
    """The bundle's folder on this host. A worker on another host than the caller fetches it from the store, by the
    model and the version that its path names."""
    if (Path(bundle) / "manifest.json").is_file():
        return bundle
    model, _, version = Path(bundle).parts[-3:]
    return Store.open().bundle(model, version).path


@lru_cache(maxsize=4)
def _scorer(bundle: str, place: Place, digest: str | None) -> Scorer:
    return Scorer(bundle, threads=1, place=place, digest=digest)  # the workers are the parallelism


@contextmanager
def _engine(workers: int, scheduler: str | None) -> Iterator[Callable[[Sequence[Any]], Sequence[Any]]]:
    """Yields an engine: threads of this process (ONNX Runtime and Arrow release the GIL), or a Dask scheduler's
    workers."""
    if scheduler is None:
        yield lambda tasks: _dask.compute(*tasks, scheduler="threads", num_workers=workers)
        return
    import distributed
    from distributed.client import FutureCancelledError
    from distributed.comm.core import CommClosedError
    from distributed.scheduler import KilledWorker

    library: Any = distributed  # it has no types
    try:
        client = library.Client(scheduler, timeout=_CONNECT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise EngineFailed(engine=scheduler, reason=str(error) or "does not answer") from error
    try:
        with client:
            yield lambda tasks: client.gather(client.compute(list(tasks)))
    except KilledWorker as error:
        reason = f"a piece ended every worker that it was given to; it may be too large for them ({error})"
        raise EngineFailed(engine=scheduler, reason=reason) from error
    except (CommClosedError, FutureCancelledError) as error:
        raise EngineFailed(engine=scheduler, reason=f"the scheduler is gone ({error})") from error
