"""Scores a whole table without a server: Dask maps the bundle's own graph over pieces of the files, in order.

The answers are those of ONNX Runtime in one process at the same batch size, bit for bit, with any number of workers: a
piece is a row group (Parquet) or a file, and each is scored by itself in batches of `predict.BATCH_ROWS`.
"""

from __future__ import annotations

import glob
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import dask
import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import EngineFailed, RowsUnfit
from serin.export.score.predict import Scorer
from serin.formats.csv_rows import as_requested, names_in_training
from serin.formats.rows import RowWriter, read_rows
from serin.store.store import Store

logger = logging.getLogger(__name__)

_PARQUET = (".parquet", ".pq")
_KNOWN = (*_PARQUET, ".csv", ".json", ".jsonl", ".ndjson")
_WAVE = 4  # pieces per worker that may wait to be written
_CONNECT_S = 5

_dask: Any = dask  # it has no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A file, or some of its row groups."""

    path: str
    groups: tuple[int, ...] | None = None


def find_pieces(rows: str | Path) -> list[Piece]:
    """Returns the pieces of a file, of every file in a folder, or of all files that a glob matches, in order of
    name."""
    place = Path(rows)
    if place.is_dir():
        files = sorted(path for path in place.iterdir() if path.suffix.lower() in _KNOWN)
    elif place.is_file():
        files = [place]
    else:
        files = sorted(Path(path) for path in glob.glob(str(rows), recursive=True))  # noqa: PTH207 (may be absolute)
    if not files:
        raise RowsUnfit(column="", reason=f"cannot be read: no file at {rows}")
    return [piece for file in files for piece in _pieces(file)]


def _pieces(file: Path) -> list[Piece]:
    if file.suffix.lower() not in _PARQUET:
        return [Piece(path=str(file))]
    try:
        with pq.ParquetFile(file) as table:
            return [Piece(path=str(file), groups=(index,)) for index in range(table.num_row_groups)]
    except (OSError, pa.ArrowException) as error:
        raise RowsUnfit(column="", reason=f"cannot be read from {file}: {error}") from error


def score_pieces(
    bundle: Path, pieces: Sequence[Piece], writer: RowWriter, *, workers: int, scheduler: str | None = None
) -> int:
    """Scores into one writer, rows in the order of the pieces, a few pieces in memory at a time. Returns the number of
    rows."""
    done = 0
    with _engine(workers, scheduler) as compute:
        for at in range(0, len(pieces), _WAVE * workers):
            wave = [
                _dask.delayed(score_piece)(str(bundle), piece) for piece in pieces[at : at + _WAVE * workers]
            ]
            for table in compute(wave):
                writer.write_table(table)
                done += len(table)
            logger.info(f"scored {done:,} rows")
    if not done:
        raise RowsUnfit(column="", reason="has no rows")
    return done


def score_into_folder(
    bundle: Path, pieces: Sequence[Piece], folder: Path, *, workers: int, scheduler: str | None = None
) -> int:
    """Writes a Parquet file for each piece where it was scored; the folder appears whole. Returns the number of
    rows."""
    if folder.exists():
        raise RowsUnfit(column="", reason=f"cannot be written to {folder}: it already exists")
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    scratch.mkdir(parents=True)
    with _engine(workers, scheduler) as compute:
        tasks = [
            _dask.delayed(write_piece)(str(bundle), piece, str(scratch / f"part-{number:05d}.parquet"))
            for number, piece in enumerate(pieces)
        ]
        done = sum(int(count) for count in compute(tasks))
    for left in scratch.glob("part-*.parquet.*"):  # of a worker that was lost
        left.unlink(missing_ok=True)
    scratch.rename(folder)
    logger.info(f"scored {done:,} rows")
    return done


def score_piece(bundle: str, piece: Piece) -> pa.Table:
    """Scores one piece on a worker, which keeps the verified bundle open for the next."""
    bundle = _bundle_here(bundle)
    scorer = _scorer(bundle)
    if piece.groups is None:
        parts = read_rows(Path(piece.path), scorer.schema, Path(bundle))
        return pa.concat_tables([scorer.score(part) for part in parts])
    with pq.ParquetFile(piece.path) as file:
        rows = file.read_row_groups(list(piece.groups), use_threads=False)
    return scorer.score(as_requested(rows, scorer.schema, names_in_training(Path(bundle))))


def write_piece(bundle: str, piece: Piece, target: str) -> int:
    """Writes the file whole or not at all: a worker that was taken for lost may still write the same piece."""
    table = score_piece(bundle, piece)
    scratch = f"{target}.{secrets.token_hex(4)}"
    pq.write_table(table, scratch, compression="zstd")
    Path(scratch).rename(target)
    return len(table)


@lru_cache(maxsize=4)
def _bundle_here(bundle: str) -> str:
    """The bundle's folder on this host. A worker on another host than the caller fetches it from the store, by the
    model and the version that its path names."""
    if (Path(bundle) / "manifest.json").is_file():
        return bundle
    model, _, version = Path(bundle).parts[-3:]
    return Store.open().bundle(model, int(version)).path


@lru_cache(maxsize=4)
def _scorer(bundle: str) -> Scorer:
    return Scorer(bundle, threads=1)  # the workers are the parallelism


@contextmanager
def _engine(workers: int, scheduler: str | None) -> Iterator[Callable[[Sequence[Any]], Sequence[Any]]]:
    """Yields an engine: threads of this process (ONNX Runtime and Arrow release the GIL), or a Dask scheduler's
    workers."""
    if scheduler is None:
        yield lambda tasks: _dask.compute(*tasks, scheduler="threads", num_workers=workers)
        return
    import distributed

    library: Any = distributed  # it has no types
    try:
        client = library.Client(scheduler, timeout=_CONNECT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise EngineFailed(engine=scheduler, reason=str(error) or "does not answer") from error
    with client:
        yield lambda tasks: client.gather(client.compute(list(tasks)))
