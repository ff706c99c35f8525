"""Finds the files of a snapshot of a Delta table, with the columns that its log gives them.

Parquet files are read as those of any other table. What only Delta's own readers understand is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from serin.columns.column import kind_of_type
from serin.errors import SourceMissing, SourceUnreadable
from serin.etl.sources.files import describe
from serin.etl.sources.tables import NULL, OTHER
from serin.formats.dataset import Snapshot, SourceFile
from serin.spec.tables import DeltaTable
from serin.store.file_systems import delta_options, file_system, reason_of, remote_errors

_HONOURED = {
    "columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint",
    "vacuumProtocolCheck", "variantType", "variantType-preview",
}  # fmt: skip
"""Features of readers that change nothing for a reader of Parquet, or are refused only where the table uses them."""


def find_delta(name: str, table: DeltaTable, digests: Path | None = None) -> tuple[SourceFile, ...]:
    """The files of the snapshot that the entry asks for, in the order in which they were written."""
    opened = open_delta(name, table)
    actions = pa.table(opened.get_add_actions(flatten=True)).to_pylist()
    if not actions:
        raise SourceUnreadable(
            table=name, path=table.delta, reason=f"version {opened.version()} holds no files"
        )
    keys = opened.metadata().partition_columns
    files = [
        (unquote(action["path"]), tuple((key, _text(action[f"partition.{key}"])) for key in keys))
        for action in sorted(actions, key=lambda each: (each["modification_time"], each["path"]))
    ]
    return _described(name, table, opened, files, digests)


def find_added(name: str, table: DeltaTable, opened: Any, since: int) -> tuple[SourceFile, ...]:
    """The files with rows that the versions after `since` have added, up to the one that is opened, in their order.

    Files that only hold rows of others again (OPTIMIZE) are left out, and so are those of rows that were deleted since.
    SourceUnreadable for a version that replaces rows: its files hold new rows beside old ones, which nothing tells
    apart."""
    keys = opened.metadata().partition_columns
    types = {field.name: field.type for field in pa.schema(opened.schema())}
    files: dict[str, tuple[tuple[str, str], ...]] = {}
    for version in range(since + 1, opened.version() + 1):
        actions = _commit(name, table, version)
        added = [each["add"] for each in actions if "add" in each and each["add"]["dataChange"]]
        removed = [each["remove"] for each in actions if "remove" in each and each["remove"]["dataChange"]]
        if added and removed:
            did = next(
                (each["commitInfo"].get("operation") for each in actions if "commitInfo" in each), None
            )
            reason = f"version {version} ({did}) replaces rows: its files hold old ones beside new ones"
            raise _refusal(name, table, f"{reason}; --since {version + 1} leaves it out")
        for each in removed:
            files.pop(unquote(each["path"]), None)
        for each in added:
            values = each.get("partitionValues") or {}
            files[unquote(each["path"])] = tuple((key, _logged(values.get(key), types[key])) for key in keys)
    return _described(name, table, opened, list(files.items()), None)


def _commit(name: str, table: DeltaTable, version: int) -> list[dict[str, Any]]:
    """The actions of a version, from its file in the log."""
    try:
        system, root = file_system(table.delta)
        content = system.cat_file(f"{root.rstrip('/')}/_delta_log/{version:020d}.json")
        return [json.loads(line) for line in content.splitlines() if line.strip()]
    except FileNotFoundError as error:
        reason = f"version {version} is gone from its log, so nothing tells which rows it has added"
        raise _refusal(name, table, f"{reason}; --since VERSION begins at a later one") from error
    except remote_errors(OSError, ValueError) as error:
        raise _refusal(name, table, reason_of(error)) from error


def _described(
    name: str,
    table: DeltaTable,
    opened: Any,
    files: Sequence[tuple[str, tuple[tuple[str, str], ...]]],
    digests: Path | None,
) -> tuple[SourceFile, ...]:
    """The files with these paths and values of partition columns, as they are now."""
    declared = tuple((field.name, kind_of_type(field.type) or OTHER) for field in pa.schema(opened.schema()))
    snapshot = Snapshot(kind="delta", source=table.delta, version=str(opened.version()))
    found = []
    try:
        system, root = file_system(table.delta)
        for path, partition in files:
            elsewhere = "://" in path or path.startswith("/")  # of a shallow clone; else it is beside the log
            path = str(file_system(path)[1]) if elsewhere else f"{root.rstrip('/')}/{path}"
            file = describe(name, system, path, partition, digests)
            found.append(replace(file, snapshot=snapshot, declared=declared))
    except FileNotFoundError as error:
        raise _refusal(
            name, table, f"version {opened.version()} names a file that is gone ({error}); it was vacuumed"
        ) from error
    except remote_errors(OSError, ValueError) as error:
        raise _refusal(name, table, reason_of(error)) from error
    return tuple(found)


def is_delta(path: str) -> bool:
    """Whether there is a Delta table at this path or URL."""
    try:
        system, root = file_system(path)
        return bool(system.isdir(f"{root.rstrip('/')}/_delta_log"))
    except remote_errors(OSError, ValueError, ImportError):
        return False  # the search for the table's files reports why


def open_delta(name: str, table: DeltaTable) -> Any:
    """The snapshot that the entry asks for. SourceUnreadable for what only Delta's own readers understand."""
    opened = _opened(name, table)
    _refuse_features(name, table, opened)
    return opened


def _opened(name: str, table: DeltaTable) -> Any:
    try:
        import deltalake
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ImportError as error:
        reason = "the package deltalake is missing; pip install 'serin[delta]' where tables are read"
        raise _refusal(name, table, reason) from error
    options = delta_options()
    try:
        version = table.version
        if table.as_of is not None:
            commits = deltalake.DeltaTable(table.delta, storage_options=options).history()
            version = _version_at(name, table, commits)
        return deltalake.DeltaTable(table.delta, version=version, storage_options=options)
    except TableNotFoundError:
        raise SourceMissing(table=name, path=table.delta) from None
    except (DeltaError, OSError, ValueError) as error:
        raise _refusal(name, table, str(error).splitlines()[0]) from error


def _version_at(name: str, table: DeltaTable, commits: Sequence[Mapping[str, Any]]) -> int:
    """The newest version at the time that is asked for; SourceUnreadable when the log knows none."""
    assert table.as_of is not None
    times = {
        int(commit["version"]): datetime.fromtimestamp(commit["timestamp"] / 1000, UTC)
        for commit in commits
        if "timestamp" in commit
    }
    known = [version for version, written in times.items() if written <= table.as_of]
    if not known:
        oldest = min(times.values()).isoformat(timespec="seconds") if times else "unknown"
        reason = f"it has no version as of {table.as_of.isoformat()}: the oldest in its log is of {oldest}"
        raise _refusal(name, table, reason)
    return max(known)


def _refuse_features(name: str, table: DeltaTable, opened: Any) -> None:
    """SourceUnreadable for what the files alone do not show."""
    features = set(opened.protocol().reader_features or ())
    unknown = sorted(features - _HONOURED)
    if unknown:
        raise _refusal(name, table, f"it needs the reader feature {unknown[0]!r}, which is not supported")
    mapping = opened.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        reason = f"it uses column mapping (mode {mapping}), which is not supported; rewrite it without"
        raise _refusal(name, table, reason)
    if "deletionVectors" in features and any(len(batch) for batch in opened.deletion_vectors()):
        reason = (
            "it has deletion vectors, which are not supported; rewrite its files (OPTIMIZE, REORG ... PURGE)"
        )
        raise _refusal(name, table, reason)


def _refusal(name: str, table: DeltaTable, reason: str) -> SourceUnreadable:
    return SourceUnreadable(table=name, path=table.delta, reason=reason)


def _logged(text: str | None, kind: pa.DataType) -> str:
    """A partition's value in the log as folders write it. Times there are in UTC, most without saying so."""
    if text is None:
        return NULL
    is_bare = pa.types.is_timestamp(kind) and kind.tz and not re.search(r"(Z|[+-]\d\d:?\d\d)$", text)
    return f"{text}Z" if is_bare else text


def _text(value: Any) -> str:
    """A partition's value as folders write it."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, date) else str(value)
