"""Finds the files behind a table's path: local or any fsspec URL, one file, a folder or a glob; Parquet or CSV."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from serin.errors import SourceMissing, SourceUnreadable
from serin.formats.dataset import SourceFile

_PARQUET = (".parquet", ".parq", ".pq")
_CSV = re.compile(r"\.(csv|tsv)(\.(gz|bz2|zst))?$")
_MARKS = ("ETag", "etag", "md5", "LastModified", "last_modified", "mtime", "created")


def find_files(table: str, url: str) -> tuple[SourceFile, ...]:
    """The table's files in the order of their names, with what tells later whether one has changed."""
    try:
        system, path = fsspec.core.url_to_fs(url)
        paths = _expand(system, path)
        return tuple(_describe(table, system, each) for each in paths)
    except FileNotFoundError:
        raise SourceMissing(table=table, path=url) from None
    except (OSError, ValueError, ImportError) as error:
        raise SourceUnreadable(table=table, path=url, reason=str(error)) from error


def is_csv(path: str) -> bool:
    return bool(_CSV.search(path.lower()))


def open_file(path: str) -> Any:
    """A file as Arrow reads it: mapped when it is local. Compressed CSV is unpacked on the way."""
    system, inner = fsspec.core.url_to_fs(path)
    if isinstance(system, LocalFileSystem):
        return pa.memory_map(inner)
    return system.open(inner, "rb")


def open_parquet(file: SourceFile, dictionary: Iterable[str] = ()) -> pq.ParquetFile:
    """`dictionary`: the columns that are read as codes into a dictionary."""
    try:
        return pq.ParquetFile(open_file(file.path), read_dictionary=list(dictionary))
    except FileNotFoundError:
        raise SourceMissing(table=file.table, path=file.path) from None
    except (OSError, pa.ArrowException) as error:
        raise SourceUnreadable(
            table=file.table,
            path=file.path,
            reason=f"it is no Parquet file ({error}); write it again, or name it .csv",
        ) from error


def _expand(system: Any, path: str) -> list[str]:
    if any(sign in path for sign in "*?[") and not system.exists(path):
        found = [each for each in system.glob(path) if not system.isdir(each)]
    elif system.isdir(path):
        files = [each for each in system.ls(path, detail=False) if not system.isdir(each)]
        found = [each for each in files if each.lower().endswith(_PARQUET) or is_csv(each)]
    else:
        found = [path] if system.exists(path) else []
    if not found:
        raise FileNotFoundError(path)
    return sorted(found)


def _describe(table: str, system: Any, path: str) -> SourceFile:
    if isinstance(system, LocalFileSystem):
        status = Path(path).stat()
        return SourceFile(table=table, path=path, size=status.st_size, modified=str(status.st_mtime_ns))
    information = system.info(path)
    mark = next((str(information[key]) for key in _MARKS if information.get(key) is not None), "")
    return SourceFile(
        table=table, path=system.unstrip_protocol(path), size=int(information.get("size") or 0), modified=mark
    )
