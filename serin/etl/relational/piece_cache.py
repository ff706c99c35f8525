"""A cache of pieces after the relational work that needs no other rows, for the next build.

A piece depends on its file, on the tables it is joined with and on the section `data`, but not on other files of its
table or on steps of features. So it stays valid when files are added or features change. An entry holds plain arrays
and JSON; one whose checksum does not match is made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from serin.columns.coded import CodedColumn, Places
from serin.columns.column import Column
from serin.etl.binding.layout import Layout
from serin.etl.engines.spill import map_buffers, write_buffers
from serin.etl.relational.checks import CheckCounts
from serin.etl.relational.relation import LoadedJoin, Prepared, Related, Unknown, prepare, relate
from serin.etl.relational.target import TargetPart
from serin.etl.sources.file_cache import entry_name
from serin.etl.sources.files import origin_of
from serin.etl.sources.tables import Piece
from serin.formats.dataset import SourceFile
from serin.machine.documents import canonical
from serin.machine.durable import replacing
from serin.spec.data import DataSpec
from serin.store.stage_keys import made_by, said

logger = logging.getLogger(__name__)
FORMAT, VERSION = "serin.piece", 2
T = TypeVar("T")
_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (Column, Prepared, Related, TargetPart, CheckCounts)
} | {CodedColumn: ("kind", "entries", "places"), Places: ("rows",), Unknown: Unknown._fields}
_KINDS = {kind.__name__: kind for kind in _FIELDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCache:
    """`folder`: where the pieces of one pipeline are kept. `base`: a digest of what all of them depend on."""

    folder: str
    base: str

    @classmethod
    def of(
        cls,
        folder: Path,
        family: str,
        data: DataSpec,
        layout: Layout,
        partners: Sequence[SourceFile],
        *,
        again: bool = False,
    ) -> PieceCache:
        """The cache of the pipeline `family` in `folder`. Removes its entries of other inputs, which are of no use any
        more, and with `again` all of them."""
        document = {
            "version": VERSION,
            "made_by": made_by("etl"),
            "data": said(data),
            "columns": [layout.kinds, layout.kept, [[r.column, r.kind, r.exact] for r in layout.reads]],
            "partners": [[file.table, file.path, file.size, file.content] for file in partners],
        }
        base = hashlib.sha256(canonical(document)).hexdigest()
        own = folder / "pieces" / family[:16]
        for other in own.iterdir() if own.is_dir() else ():
            if again or other.name != base:
                shutil.rmtree(other, ignore_errors=True)
        return cls(folder=str(own / base), base=base)

    def path(self, piece: Piece) -> Path:
        file = origin_of(piece.file)
        origin = [file.path, file.size, file.content, file.partition]
        groups = [Path(piece.file.path).name, piece.groups]  # of the file, or of one it was rewritten to
        return Path(self.folder) / entry_name([origin, groups, piece.first_row, piece.rows])

    def log_found(self, pieces: Sequence[Piece]) -> None:
        found = sum(self.path(piece).exists() for piece in pieces)
        if found:
            logger.info(f"{found} of {len(pieces)} pieces were found in the cache of an earlier build")


def prepare_or_find(
    piece: Piece, data: DataSpec, layout: Layout, joins: Sequence[LoadedJoin], cache: PieceCache
) -> Prepared:
    """The result of `prepare`, from the cache when it is there."""
    return get_or_make(cache, piece, lambda: prepare(piece, data, layout, joins), Prepared)


def relate_or_find(piece: Piece, layout: Layout, joins: Sequence[LoadedJoin], cache: PieceCache) -> Related:
    """The result of `relate`, from the cache when it is there."""
    return get_or_make(cache, piece, lambda: relate(piece, layout, joins), Related)


def get_or_make(cache: PieceCache, piece: Piece, make: Callable[[], T], kind: type[T]) -> T:
    """The piece from the cache, else what `make` returns, which is then kept if the disk has room for it."""
    path = cache.path(piece)
    with suppress(OSError):  # most often: it is not there
        found = read_piece_file(path)
        if isinstance(found, kind):
            path.touch()  # still of use
            return found
        path.unlink()
    made = make()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write_piece_file(temporary, made)
    return made


def write_piece_file(path: Path, value: Any) -> None:
    buffers: list[Any] = []
    tree = _Writer(buffers).written(value)
    header = {"format": FORMAT, "version": VERSION, "tree": tree, "checksum": _checksum(buffers)}
    write_buffers(path, json.dumps(header, separators=(",", ":")).encode(), buffers)


def read_piece_file(path: Path) -> Any:
    """The value; its arrays are mapped from the file, private when written to. None when the file is not whole."""
    try:
        content, buffers = map_buffers(path)
        header = json.loads(bytes(content))
        if (header["format"], header["version"]) != (FORMAT, VERSION):
            return None
        return _Reader(buffers).read(header["tree"]) if _checksum(buffers) == header["checksum"] else None
    except (ValueError, KeyError, TypeError, IndexError, struct.error, pa.ArrowException):
        return None


def _checksum(buffers: Sequence[Any]) -> int:
    return functools.reduce(lambda sum_so_far, buffer: zlib.crc32(buffer, sum_so_far), buffers, 0)


class _Writer:
    """Values as JSON; arrays go to `buffers`. What is shared is written once."""

    def __init__(self, buffers: list[Any]) -> None:
        self._buffers = buffers
        self._seen: dict[int, int] = {}

    def written(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            self._buffers.append(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
            return {"array": len(self._buffers) - 1, "dtype": value.dtype.str, "shape": value.shape}
        if isinstance(value, pa.Array):
            return {"arrow": self._arrow(value)}
        if type(value) in _FIELDS:
            return self._object(value)
        if isinstance(value, Mapping):
            return {"map": [[name, self.written(each)] for name, each in value.items()]}
        assert isinstance(value, tuple | list), type(value)
        return {"tuple" if isinstance(value, tuple) else "list": [self.written(each) for each in value]}

    def _object(self, value: Any) -> Any:
        if id(value) in self._seen:
            return {"same": self._seen[id(value)]}
        content = [self.written(getattr(value, name)) for name in _FIELDS[type(value)]]
        self._seen[id(value)] = len(self._seen)
        return {"object": type(value).__name__, "fields": content}

    def _arrow(self, value: pa.Array) -> int:
        sink = pa.BufferOutputStream()
        batch = pa.record_batch([value], ["values"])
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        self._buffers.append(sink.getvalue())
        return len(self._buffers) - 1


class _Reader:
    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._seen: list[Any] = []

    def read(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "array" in tree:
            flat = np.frombuffer(self._buffers[tree["array"]], tree["dtype"])
            return flat.reshape(tree["shape"])
        if "arrow" in tree:
            return (
                pa.ipc.open_stream(pa.py_buffer(self._buffers[tree["arrow"]])).read_all()[0].combine_chunks()
            )
        if "same" in tree:
            return self._seen[tree["same"]]
        if "object" in tree:
            kind = _KINDS[tree["object"]]
            content = [self.read(each) for each in tree["fields"]]
            made = kind(**dict(zip(_FIELDS[kind], content, strict=True)))
            self._seen.append(made)
            return made
        if "map" in tree:
            return {name: self.read(each) for name, each in tree["map"]}
        return tuple(map(self.read, tree["tuple"])) if "tuple" in tree else list(map(self.read, tree["list"]))
