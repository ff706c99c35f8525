"""Finds and reads the pieces of a table that is scored in bulk: files on disk or at any fsspec URL (s3://)."""

from __future__ import annotations

import glob
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import RowsUnfit
from serin.formats.rows import as_requested, names_in_training, read_rows
from serin.formats.schema import Schema
from serin.store.file_systems import file_system, reason_of, remote_errors

_PARQUET = (".parquet", ".pq")
_KNOWN = (*_PARQUET, ".csv", ".json", ".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A file, or some of its row groups. `mark`: the file's size and its date or tag: another mark, other rows."""

    path: str
    groups: tuple[int, ...] | None = None
    mark: str = ""


def is_url(place: object) -> bool:
    return "://" in str(place)


def find_pieces(rows: str | Path) -> list[Piece]:
    """Returns the pieces of a file, of every file in a folder, or of all files that a glob matches, in order of
    name."""
    with _reading(rows):
        files = _remote_files(str(rows)) if is_url(rows) else _local_files(Path(rows))
        if not files:
            raise RowsUnfit(column="", reason=f"cannot be read: no file at {rows}")
        return [piece for path, mark in files for piece in _pieces(path, mark)]


def read_piece(piece: Piece, schema: Schema, bundle: Path) -> Iterator[pa.Table]:
    """Yields the rows of a piece as the model wants them."""
    with _reading(piece.path):
        if piece.groups is not None:
            with _open_parquet(piece.path) as file:
                rows = file.read_row_groups(list(piece.groups), use_threads=False)
            yield as_requested(rows, schema, names_in_training(bundle))
        elif is_url(piece.path):  # text formats are parsed from a file
            system, path = file_system(piece.path)
            with tempfile.TemporaryDirectory(prefix="serin-rows-") as scratch:
                copy = Path(scratch) / path.rpartition("/")[2]
                with system.open(path, "rb") as source, copy.open("wb") as target:
                    shutil.copyfileobj(source, target)
                yield from read_rows(copy, schema, bundle)
        else:
            yield from read_rows(Path(piece.path), schema, bundle)


def _local_files(place: Path) -> list[tuple[str, str]]:
    if place.is_dir():
        files = sorted(path for path in place.iterdir() if path.suffix.lower() in _KNOWN)
    elif place.is_file():
        files = [place]
    else:
        files = sorted(Path(path) for path in glob.glob(str(place), recursive=True))  # noqa: PTH207 (may be absolute)
    return [(str(file), f"{file.stat().st_size}-{file.stat().st_mtime_ns}") for file in files]


def _remote_files(url: str) -> list[tuple[str, str]]:
    system, path = file_system(url)
    system.invalidate_cache()  # a listing of an earlier call
    if any(sign in path for sign in "*?[") and not system.exists(path):
        found = system.glob(path)
    elif system.isdir(path):
        found = [each for each in system.ls(path, detail=False) if each.lower().endswith(_KNOWN)]
    else:
        found = [path] if system.exists(path) else []
    return [(system.unstrip_protocol(each), _mark(system.info(each))) for each in sorted(found)]


def _mark(info: dict[str, Any]) -> str:
    return "-".join(
        str(info[key]) for key in ("size", "ETag", "e_tag", "LastModified", "created") if key in info
    )


def _pieces(path: str, mark: str) -> list[Piece]:
    if not path.lower().endswith(_PARQUET):
        return [Piece(path=path, mark=mark)]
    with _open_parquet(path) as table:
        return [Piece(path=path, groups=(index,), mark=mark) for index in range(table.num_row_groups)]


@contextmanager
def _open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    if not is_url(path):
        with pq.ParquetFile(path) as file:
            yield file
        return
    system, inner = file_system(path)
    with system.open(inner, "rb") as source, pq.ParquetFile(source) as file:
        yield file


@contextmanager
def _reading(place: object) -> Iterator[None]:
    """Turns what a file system raises into RowsUnfit."""
    try:
        yield
    except ImportError as error:
        reason = reason_of(error, str(place))
        raise RowsUnfit(column="", reason=f"cannot be read from {place}: {reason}") from error
    except remote_errors(OSError, ValueError, pa.ArrowException) as error:
        raise RowsUnfit(column="", reason=f"cannot be read from {place}: {reason_of(error)}") from error
