"""The rows of bulk scoring as pieces, files on disk or at any fsspec URL (s3://), and its result as a folder of parts,
which a second run completes after the first was killed.

A part is written whole or not at all. A folder on disk gets its name when all parts are there; until then they are in
`.NAME.PLAN.partial` beside it. At a URL (s3://) the parts have their place at once, and `_SUCCESS` says that all are
there. The plan says which rows and which version the parts are of (at a URL `plan.json` does): parts of another plan
are not used.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import RowsUnfit
from serin.formats.csv_format import CsvFormat
from serin.formats.rows import as_requested, names_in_training, read_rows
from serin.formats.schema import Schema
from serin.machine.durable import sync, write_whole
from serin.machine.locks import locked
from serin.store.file_systems import file_system, reason_of, remote_errors

logger = logging.getLogger(__name__)

PLAN, SUCCESS = "plan.json", "_SUCCESS"
_FORMAT = {"format": "serin.bulk", "version": 1}
_PLAN_SIGNS = 16  # of its digest, in names
_OTHER_PLAN = "parts of an earlier run are of other rows or another version; starting again"
_PARQUET = (".parquet", ".pq")
_KNOWN = (*_PARQUET, ".csv", ".json", ".jsonl", ".ndjson")


def plan_digest(bundle_digest: str, device: str, pieces: Sequence[Piece]) -> str:
    """Returns a digest that is equal when the parts of an earlier run may be kept."""
    told = [
        [piece.path, list(piece.groups or ()), piece.mark, str((piece.constants, piece.csv))]
        for piece in pieces
    ]
    return hashlib.sha256(json.dumps([bundle_digest, device, told]).encode()).hexdigest()


@contextmanager
def open_parts(out: str, digest: str) -> Iterator[Parts]:
    """Yields the place of the parts, with those of an earlier run of the same plan. RowsUnfit when the result is there
    already, or when another run writes it."""
    if is_url(out):
        yield _open_url(out, digest)
        return
    folder = Path(out)
    if folder.exists():
        raise RowsUnfit(column="", reason=f"cannot be written to {folder}: it already exists")
    folder.parent.mkdir(parents=True, exist_ok=True)
    alone = False
    try:
        with locked(folder.with_name(f".{folder.name}.lock"), wait_s=0):
            alone = True
            yield _open_folder(folder, digest)
    except TimeoutError as error:
        if alone:
            raise
        raise RowsUnfit(column="", reason=f"cannot be written to {folder}: another run writes it") from error


def _open_folder(folder: Path, digest: str) -> Parts:
    """A worker that was taken for lost may still write parts of another plan: they are not where those of this are."""
    scratch = folder.with_name(f".{folder.name}.{digest[:_PLAN_SIGNS]}.partial")
    plan = "[0-9a-f]" * _PLAN_SIGNS
    for other in folder.parent.glob(f".{glob.escape(folder.name)}.{plan}.partial"):
        if other != scratch:
            logger.info(f"{folder}: {_OTHER_PLAN}")
            shutil.rmtree(other, ignore_errors=True)
    scratch.mkdir(exist_ok=True)
    for left in scratch.glob("part-*.parquet.*"):  # of a worker that was lost
        left.unlink(missing_ok=True)
    return FolderParts(str(folder), str(scratch))


def _open_url(url: str, digest: str) -> Parts:
    parts = UrlParts(url.rstrip("/"))
    system, root = file_system(parts.url)
    system.invalidate_cache()
    if system.exists(f"{root}/{SUCCESS}"):
        raise RowsUnfit(column="", reason=f"cannot be written to {url}: it already exists")
    plan = f"{root}/{PLAN}"
    if _other_plan(system.cat_file(plan) if system.exists(plan) else None, digest, url):
        for left in system.glob(f"{root}/part-*.parquet"):
            system.rm_file(left)
    system.makedirs(root, exist_ok=True)
    system.pipe_file(plan, json.dumps({**_FORMAT, "digest": digest}).encode())
    return parts


def _other_plan(found: bytes | None, digest: str, place: object) -> bool:
    if found is None:
        return True
    try:
        same = json.loads(found) == {**_FORMAT, "digest": digest}
    except ValueError:
        same = False
    if not same:
        logger.info(f"{place}: {_OTHER_PLAN}")
    return not same


class FolderParts:
    """Where parts are written. It travels to workers, so it holds names only."""

    def __init__(self, folder: str, scratch: str) -> None:
        self._folder, self._scratch = folder, scratch

    def write(self, number: int, table: pa.Table) -> None:
        """A worker that was taken for lost may still write the same part."""
        target = self._path(number)
        scratch = target.with_name(f"{target.name}.{secrets.token_hex(4)}")
        pq.write_table(table, scratch, compression="zstd")
        sync(scratch)
        scratch.rename(target)

    def rows(self, number: int) -> int | None:
        """Returns the rows of a part that is there; None when it has to be written."""
        try:
            return int(pq.read_metadata(self._path(number)).num_rows)
        except (OSError, pa.ArrowException):
            return None

    def schema(self, number: int) -> pa.Schema:
        return pq.read_schema(self._path(number))

    def finish(self, note: bytes | None = None) -> None:
        """Gives the folder its name. `note`: of `_SUCCESS`, which appears with the parts; None: no such file."""
        scratch, folder = Path(self._scratch), Path(self._folder)
        if note is not None:
            write_whole(scratch / SUCCESS, note)
        for left in scratch.glob("part-*.parquet.*"):
            left.unlink(missing_ok=True)
        scratch.rename(folder)
        sync(folder.parent)
        folder.with_name(f".{folder.name}.lock").unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return Path(self._scratch) / f"part-{number:05d}.parquet"


class UrlParts:
    """The same at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def write(self, number: int, table: pa.Table) -> None:
        content = io.BytesIO()
        pq.write_table(table, content, compression="zstd")
        system, root = file_system(self.url)
        system.pipe_file(self._path(root, number), content.getvalue())

    def rows(self, number: int) -> int | None:
        system, root = file_system(self.url)
        try:
            with system.open(self._path(root, number), "rb") as source:
                return int(pq.read_metadata(source).num_rows)
        except (OSError, pa.ArrowException):
            return None

    def schema(self, number: int) -> pa.Schema:
        system, root = file_system(self.url)
        with system.open(self._path(root, number), "rb") as source:
            return pq.read_schema(source)

    def finish(self, note: bytes | None = None) -> None:
        system, root = file_system(self.url)
        system.pipe_file(f"{root}/{SUCCESS}", note or b"")
        system.rm_file(f"{root}/{PLAN}")

    def _path(self, root: str, number: int) -> str:
        return f"{root}/part-{number:05d}.parquet"


Parts = FolderParts | UrlParts


def read_parts(out: str) -> Iterator[pa.Table]:
    """Yields the parts of a finished result, in order."""
    system, root = file_system(out.rstrip("/"))
    found: list[Any] = sorted(system.glob(f"{root}/part-*.parquet"))
    for path in found:
        with system.open(path, "rb") as source:
            yield pq.read_table(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A file, or some of its row groups.

    `mark`: the file's size and its date or tag: another mark, other rows. `constants`: columns that a file without them
    (without values in them) has by its place, with their type and their value as text. `order`: of all columns; else
    the file's, then these. `csv`: how a CSV file is written; None: like the table that the model was trained on, or
    plain."""

    path: str
    groups: tuple[int, ...] | None = None
    mark: str = ""
    constants: tuple[tuple[str, pa.DataType, str | None], ...] = ()
    order: tuple[str, ...] = ()
    csv: CsvFormat | None = None


def is_url(place: object) -> bool:
    return "://" in str(place)


def find_pieces(rows: str | Path) -> list[Piece]:
    """Returns the pieces of a file, of every file in a folder, or of all files that a glob matches, in order of
    name."""
    files = find_marked(rows)
    if not files:
        raise RowsUnfit(column="", reason=f"cannot be read: no file at {rows}")
    return pieces_of(files)


def find_marked(rows: str | Path) -> dict[str, str]:
    """Returns the files there, by name, each with a mark that is another one when it has changed."""
    with _reading(rows):
        return dict(_remote_files(str(rows)) if is_url(rows) else _local_files(Path(rows)))


def pieces_of(files: Mapping[str, str]) -> list[Piece]:
    """Returns the pieces of files with their marks, in this order."""
    found = []
    for path, mark in files.items():
        with _reading(path):
            found += _pieces(path, mark)
    return found


def read_piece(piece: Piece, schema: Schema, bundle: Path) -> Iterator[pa.Table]:
    """Yields the rows of a piece as the model wants them."""
    with _reading(piece.path):
        for rows in _read(piece, schema, bundle):
            yield as_requested(_with_constants(rows, piece), schema, names_in_training(bundle))


def _read(piece: Piece, schema: Schema, bundle: Path) -> Iterator[pa.Table]:
    if piece.groups is not None:
        with _open_parquet(piece.path) as file:
            yield file.read_row_groups(list(piece.groups), use_threads=False)
    elif is_url(piece.path):  # text formats are parsed from a file
        system, path = file_system(piece.path)
        with tempfile.TemporaryDirectory(prefix="serin-rows-") as scratch:
            copy = Path(scratch) / path.rpartition("/")[2]
            with system.open(path, "rb") as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target)
            yield from read_rows(copy, schema, bundle, piece.csv)
    else:
        yield from read_rows(Path(piece.path), schema, bundle, piece.csv)


def _with_constants(rows: pa.Table, piece: Piece) -> pa.Table:
    for name, kind, text in piece.constants:
        place = rows.schema.get_field_index(name)
        if place >= 0 and (text is not None or rows.column(place).null_count < len(rows)):
            continue
        column = pa.repeat(pa.array([text], pa.string()).cast(kind)[0], len(rows))
        rows = rows.append_column(name, column) if place < 0 else rows.set_column(place, name, column)
    return rows.select(piece.order) if piece.order else rows


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
    infos = {each: system.info(each) for each in sorted(found)}
    marks = ("size", "ETag", "e_tag", "LastModified", "created")
    return [
        (system.unstrip_protocol(each), "-".join(str(info[key]) for key in marks if key in info))
        for each, info in infos.items()
    ]


def _pieces(path: str, mark: str) -> list[Piece]:
    if not path.lower().endswith(_PARQUET):
        return [Piece(path=path, mark=mark)]
    with _open_parquet(path) as table:
        groups: list[tuple[int, ...]] = [(index,) for index in range(table.num_row_groups)]
    return [Piece(path=path, groups=each, mark=mark) for each in groups or [()]]


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
