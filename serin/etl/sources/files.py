"""Finds the files behind a table's path: local or any fsspec URL; one file, a folder with all below it, or a glob.

Folders named key=value add a column to the files below them.
"""

from __future__ import annotations

import re
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from serin.errors import SourceMissing, SourceUnreadable
from serin.formats.dataset import SourceFile
from serin.machine.hardware import core_count
from serin.store.file_digests import content_digest
from serin.store.file_systems import file_system, reason_of, remote_errors

_PARQUET = (".parquet", ".parq", ".pq")
_TEXT = re.compile(r"\.(csv|tsv|jsonl|ndjson|json)(\.(gz|bz2|zst))?$")
_ARROW = (".arrow", ".feather", ".ipc", ".arrows")
_PARTITION = re.compile(r"([^=/]+)=([^/]*)")

_HASHED_AT_ONCE = 16
_FOOTERS = 64  # that are kept
_footers: dict[SourceFile, pq.FileMetaData] = {}  # as they were when each file was opened last, oldest first
_footers_lock = threading.Lock()

Format = Literal["parquet", "csv", "json", "arrow"]
_OF_CONTENT = (
    "ETag", "etag", "e_tag", "VersionId", "version_id", "generation", "md5", "md5Hash", "Content-MD5", "content_md5",
    "Digest", "sha",
)  # fmt: skip
_OF_TIME = ("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "updated")
_SETTLED_S = 60.0  # HTTP tells whole seconds, and the server's clock is not ours


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCopy(SourceFile):
    """Returns the converted file, for reading; messages to people name the original."""

    origin: SourceFile


def origin_of(file: SourceFile) -> SourceFile:
    """The file as the user knows it."""
    return origin_of(file.origin) if isinstance(file, LocalCopy) else file


def local_copy(path: Path, origin: SourceFile) -> LocalCopy:
    """The file at `path`, which holds the rows of `origin`."""
    status = path.stat()
    return LocalCopy(
        table=origin.table,
        path=str(path),
        size=status.st_size,
        modified=str(status.st_mtime_ns),
        partition=origin.partition,
        origin=origin,
    )


def find_files(table: str, url: str, digests: Path | None = None) -> tuple[SourceFile, ...]:
    """The table's files in the order of their names. With `digests`, the folder that remembers what was hashed, each
    says what tells later whether it has changed (`content`)."""
    try:
        system, path = file_system(url)
        if not isinstance(system, LocalFileSystem):
            system.invalidate_cache()  # a listing of an earlier call
        root, paths = _expand(system, path)

        def find(each: str) -> SourceFile:
            return describe(table, system, each, _partition(each.removeprefix(root)), digests)

        if digests is None or not isinstance(system, LocalFileSystem) or len(paths) == 1:
            return tuple(map(find, paths))
        with ThreadPoolExecutor(min(_HASHED_AT_ONCE, core_count())) as threads:
            return tuple(threads.map(find, paths))
    except FileNotFoundError:
        raise SourceMissing(table=table, path=url) from None
    except ImportError as error:
        where = "where tables are read (with Dask: on the workers too)"
        raise SourceUnreadable(table=table, path=url, reason=f"{reason_of(error, url)} {where}") from error
    except remote_errors(OSError, ValueError) as error:
        raise SourceUnreadable(table=table, path=url, reason=reason_of(error)) from error


def format_of(path: str) -> Format | None:
    """By the file's ending; None when it says nothing."""
    name = path.lower()
    if name.endswith(_PARQUET):
        return "parquet"
    if name.endswith(_ARROW):
        return "arrow"
    text = _TEXT.search(name)
    if text is None:
        return None
    return "csv" if text[1] in ("csv", "tsv") else "json"


def file_format(file: SourceFile) -> Format | None:
    """By the file's ending; CSV when that says nothing and the table has options for CSV."""
    return format_of(file.path) or (None if file.csv is None else "csv")


def compression_of(path: str) -> str | None:
    """What a text file is packed with, in the words of pyarrow."""
    return {"gz": "gzip", "bz2": "bz2", "zst": "zstd"}.get(path.lower().rpartition(".")[2])


def open_file(path: str) -> Any:
    """A file as Arrow reads it: mapped when it is local."""
    system, inner = file_system(path)
    if isinstance(system, LocalFileSystem):
        return pa.memory_map(inner)
    return system.open(inner, "rb")


def open_parquet(file: SourceFile, dictionary: Iterable[str] = ()) -> pq.ParquetFile:
    """`dictionary`: the columns that are read as codes into a dictionary. The footer of a file that was opened before
    without them is not parsed again."""
    try:
        texts = list(dictionary)
        known = _footers.get(file) if texts else None
        opened = pq.ParquetFile(
            open_file(file.path), metadata=known, read_dictionary=texts, page_checksum_verification=True
        )
        if not texts:
            _keep_footer(file, opened.metadata)
        return opened
    except FileNotFoundError:
        raise SourceMissing(table=file.table, path=file.path) from None
    except remote_errors() as error:
        raise SourceUnreadable(table=file.table, path=file.path, reason=reason_of(error)) from error
    except (OSError, pa.ArrowException) as error:
        raise SourceUnreadable(
            table=file.table,
            path=file.path,
            reason=f"it is not a complete Parquet file ({error}); write it again, or use the extension of its format "
            f"(.csv, .jsonl, .arrow). For CSV with another ending set data.tables.{file.table}.delimiter",
        ) from error


def _keep_footer(file: SourceFile, footer: pq.FileMetaData) -> None:
    with _footers_lock:
        _footers.pop(file, None)
        _footers[file] = footer
        while len(_footers) > _FOOTERS:
            del _footers[next(iter(_footers))]


def _expand(system: Any, path: str) -> tuple[str, list[str]]:
    """The files, in order of their names, and what all their names start with."""
    root = path
    if any(sign in path for sign in "*?[") and not system.exists(path):
        found = [each for each in system.glob(path) if not system.isdir(each)]
        root = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]
    elif system.isdir(path):
        if system.isdir(f"{path.rstrip('/')}/_delta_log"):
            raise ValueError("it is a Delta table, whose folder also holds removed rows; write {delta: PATH}")
        found = [
            each for each in system.find(path) if format_of(each) and not _hidden(each.removeprefix(path))
        ]
    else:
        found = [path] if system.exists(path) else []
        root = path.rpartition("/")[0]
    if not found:
        raise FileNotFoundError(path)
    return root, sorted(found)


def _hidden(path: str) -> bool:
    return any(part.startswith(("_", ".")) and "=" not in part for part in path.split("/"))


def _partition(path: str) -> tuple[tuple[str, str], ...]:
    """The key=value folders of a path, as pairs."""
    matches = [_PARTITION.fullmatch(part) for part in path.split("/")[:-1]]
    return tuple((unquote(match[1]), unquote(match[2])) for match in matches if match)


def describe(
    table: str, system: Any, path: str, partition: tuple[tuple[str, str], ...], digests: Path | None
) -> SourceFile:
    """A file of a table as it is now. `digests`: see `find_files`."""
    if isinstance(system, LocalFileSystem):
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                "it is not a regular file; a pipe or a device can be read only once: save it as a file"
            )
        return SourceFile(
            table=table,
            path=path,
            size=status.st_size,
            modified=str(status.st_mtime_ns),
            partition=partition,
            content="" if digests is None else content_digest(Path(path), digests),
        )
    information = system.info(path)
    mark, is_settled = _mark(information)
    return SourceFile(
        table=table,
        path=system.unstrip_protocol(path),
        size=int(information.get("size") or 0),
        modified=mark,
        partition=partition,
        content=mark if is_settled else "",
    )


def _mark(said: Mapping[str, Any]) -> tuple[str, bool]:
    """Versions and digests of the content, else the time of its last change with its size; empty when there is none of
    them. And whether every later change gives another mark: within the second of its time a file can change again and
    look the same, and a weak ETag promises too little by itself."""
    given = {name: str(said[name]) for name in _OF_CONTENT if said.get(name)}
    strong = {name: value for name, value in given.items() if not value.startswith("W/")}
    if strong:
        return _written({**strong, "size": said.get("size")}), True
    times = {name: said[name] for name in _OF_TIME if said.get(name) is not None}
    moments = [_moment(value) for value in times.values()]
    known = [moment for moment in moments if moment is not None]
    if not moments or len(known) < len(moments):
        return "", False
    is_settled = all(time.time() - moment >= _SETTLED_S for moment in known)
    return _written({**given, **times, "size": said.get("size")}), is_settled


def _moment(value: Any) -> float | None:
    """Returns seconds since 1970; None for an invalid time."""
    try:
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            found = value
        else:
            text = str(value)
            found = datetime.fromisoformat(text) if text[:4].isdigit() else parsedate_to_datetime(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _written(parts: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(parts.items()) if value is not None)
