"""Finds the rows of a source that no run of scheduled scoring has scored, by the watermarks of its target.

    files     those that no run has scored, in the order of their names
    Delta     the files with rows that were added since the version of the last run
    a query   the rows whose first order_by column is larger than at the last run

A clock decides nothing. What cannot be distinguished from rows that were scored is refused by name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import DatabaseFailed, ScoringRefused, SourceMissing, SourceUnreadable
from serin.etl.sources.delta import find_added, find_delta, open_delta
from serin.etl.sources.find import find_table
from serin.etl.sources.sql import query_digest, read_sql
from serin.etl.sources.tables import NULL, partition_types
from serin.formats.dataset import SourceFile
from serin.scoring.parts import Piece, is_url, pieces_of
from serin.scoring.targets.target import ScoredRun
from serin.spec.scores import name_of
from serin.spec.tables import DeltaTable, FileTable, LongForm, SqlTable
from serin.store.databases import connected, literal, quoted
from serin.store.file_systems import file_system

if TYPE_CHECKING:
    from collections.abc import Callable

Constants = tuple[tuple[str, pa.DataType, str | None], ...]
_PLAIN_TYPES = ("int64", "double", "string")
_NAMED = 3  # files that a refusal names
_TABLE = "rows"  # what the readers of the ETL call it


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """The rows of a run in pieces, and what its watermark says of them: see ScoredRun."""

    pieces: Sequence[Piece]
    files: dict[str, str] = field(default_factory=dict)
    source: str = ""
    upto: int | str | None = None
    since: int | str | None = None
    seen: int | None = None

    def watermark(self, release: str, t: float, rows: int, columns: dict[str, str]) -> ScoredRun:
        return ScoredRun(
            release=release,
            t=t,
            rows=rows,
            columns=columns,
            files=self.files,
            source=self.source,
            upto=self.upto,
            since=self.since,
            seen=self.seen,
        )


def find_new(
    source: str | LongForm, runs: Mapping[int, ScoredRun], *, since: str | None, late: bool, scratch: Path
) -> NewRows | None:
    """Returns the rows that no run has scored; None when there are none. ScoringRefused where that is not plain.

    `scratch`: gets the rows of a query."""
    try:
        match source:
            case DeltaTable():
                return _new_versions(source, runs, _number(source, since), late=late)
            case SqlTable():
                return _new_values(source, runs, since, late=late, scratch=scratch)
            case _:
                return _new_files(source, runs, since=since, late=late)
    except SourceMissing as error:
        raise _refusal(source, "there is nothing; correct the path, or make it first") from error
    except SourceUnreadable as error:
        reason = f"{error.fields['path']} cannot be read: {error.fields['reason']}"
        raise _refusal(source, reason) from error
    except DatabaseFailed as error:
        raise _refusal(source, f"it cannot be read: {error.reason}") from error


def _refusal(source: str | LongForm, reason: str) -> ScoringRefused:
    return ScoringRefused(target=name_of(source), reason=reason)


def _new_files(
    source: str | FileTable, runs: Mapping[int, ScoredRun], *, since: str | None, late: bool
) -> NewRows | None:
    run = _same_source(source, "", runs.values())
    try:
        files = _find_files(source)
    except SourceMissing:
        if run is None and not _may_be_empty(_path(source)):
            raise
        return None
    found = {path: _mark(file) for path, file in files.items()}
    scored = {path: mark for each in runs.values() for path, mark in each.files.items()}
    changed = [path for path, mark in found.items() if scored.get(path, mark) != mark]
    if changed:
        reason = f"{_some(changed)} changed after being scored; score such rows under another name"
        raise _refusal(source, reason)
    new = [path for path in found if path not in scored]
    if since is not None:
        behind = _fixed_part(_path(source))
        new = [path for path in new if path.removeprefix(behind).lstrip("/") >= since]
    last = max(scored, default="")
    before = [path for path in new if path < last]
    if before and not late:
        told = f"{_some(before)} came late: {last} was scored already"
        raise _refusal(source, f"{told}. --late scores late files, --since leaves them out")
    kinds = partition_types(list(files.values())) if new else {}
    if run is not None:  # a folder that is gone may have been the only text
        kinds |= {name: pa.string() for name in kinds if run.columns.get(name) == "string"}
    chosen = settled([files[path] for path in new])
    return _with_pieces(
        chosen,
        lambda file: tuple((name, kinds[name], _plain(text)) for name, text in file.partition),
        NewRows(pieces=(), files={file.path: found[file.path] for file in chosen}),
    )


def settled(files: Sequence[SourceFile]) -> list[SourceFile]:
    """The files up to one that can change within a minute and then look the same: it is of the next run."""
    return list(takewhile(lambda file: not is_url(file.path) or file.content or not file.modified, files))


def _path(source: str | FileTable) -> str:
    return source if isinstance(source, str) else source.path


def _may_be_empty(rows: str) -> bool:
    """Whether files may come there: a glob, or a folder that exists."""
    system, path = file_system(rows)
    return any(sign in rows for sign in "*?[") or bool(system.exists(path))


def _find_files(source: str | FileTable) -> dict[str, SourceFile]:
    return {file.path: file for file in find_table(_TABLE, source)}


def _mark(file: SourceFile) -> str:
    return f"{file.size}-{file.modified}"


def check_unchanged(source: str | LongForm, new: NewRows) -> None:
    """Raises ScoringRefused when files are no longer those that were found: rows may be of before or after."""
    if not new.files or not isinstance(source, str | FileTable):
        return
    try:
        now = {path: _mark(file) for path, file in _find_files(source).items()}
    except SourceMissing:
        now = {}
    changed = [path for path, mark in new.files.items() if now.get(path) != mark]
    if changed:
        reason = f"{_some(changed)} changed while it was scored; nothing of this run is there"
        raise _refusal(
            source, f"{reason}. Run again, and write files under another name until they are whole"
        )


def _fixed_part(rows: str) -> str:
    """The folders of a glob before its first sign; all of another path."""
    first = re.split(r"[*?\[]", rows, maxsplit=1)[0]
    fixed = rows if first == rows else first.rpartition("/")[0]
    return fixed if is_url(fixed) else str(Path(fixed).absolute())


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more


def _new_versions(
    source: DeltaTable, runs: Mapping[int, ScoredRun], since: int | None, *, late: bool
) -> NewRows | None:
    if late:
        raise _refusal(source, "--late is for files: a Delta table has the order of its versions")
    opened = open_delta(_TABLE, source)
    newest: int = opened.version()
    name = f"delta {opened.metadata().id}"
    last = _same_source(source, name, runs.values())
    done = -1 if last is None else int(last.upto or 0)
    if newest < done:
        reason = f"its newest version is {newest}, and version {done} was scored; score into another target"
        raise _refusal(source, reason)
    from_version = max(done, -1 if since is None else since - 1)
    if from_version >= 0:
        files = find_added(_TABLE, source, opened, from_version)
    else:
        pinned = source.model_copy(update={"version": newest})
        files = find_delta(_TABLE, pinned) if opened.file_uris() else ()
    schema = pa.schema(opened.schema())
    found = _with_pieces(
        files, lambda file: _of_snapshot(file, schema), NewRows(pieces=(), source=name, upto=newest)
    )
    return found and replace(
        found, pieces=[replace(piece, order=tuple(schema.names)) for piece in found.pieces]
    )


def _of_snapshot(file: SourceFile, schema: pa.Schema) -> Constants:
    """Values of partition columns, and nulls for columns that were added to the table after the file."""
    values = dict(file.partition)
    return tuple((each.name, each.type, _plain(values.get(each.name, NULL))) for each in schema)


def _plain(text: str) -> str | None:
    return None if text == NULL else text


def _with_pieces(
    files: Sequence[SourceFile],
    constants: Callable[[SourceFile], Constants],
    new: NewRows,
) -> NewRows | None:
    if not files:
        return None
    pieces = [
        replace(piece, constants=constants(file), csv=file.csv)
        for file in files
        for piece in pieces_of({file.path: file.content or _mark(file)})
    ]
    return replace(new, pieces=pieces)


def _new_values(
    source: SqlTable, runs: Mapping[int, ScoredRun], since: str | None, *, late: bool, scratch: Path
) -> NewRows | None:
    """The stages: how far the query goes now, then its rows up to there. Rows that come in between are of the next run,
    or late in it: `seen` counts those that this one has read."""
    column = source.order_by[0]
    if late:
        advice = f"give it a larger {column}, or leave it out with --since"
        raise _refusal(
            source, f"--late is for files: nothing tells a late row from those that were scored; {advice}"
        )
    name = f"query {query_digest(source)} of {source.connection}"
    last = _same_source(source, name, runs.values())
    after = None if last is None else last.upto
    first = _typed(source, since, after)
    newest, nulls, before, known = _extent(source, last, first)
    if nulls:
        reason = f"{nulls} rows have no {column}, so nothing tells whether they were scored"
        raise _refusal(source, f"{reason}; leave them out in the query (where {column} is not null)")
    came = 0 if last is None else known - (last.seen or 0)
    if came > 0 and before:
        reason = f"{came} rows came late: their {column} is at most {after!r}, which was scored"
        advice = "--since above that leaves them out; a query can wait for late rows (now() - interval '5 minutes')"
        raise _refusal(source, f"{reason}. {advice}")
    if newest is None:
        return None
    bounds = [f"{quoted(column)} <= {literal(newest)}", *_lower(column, after, first)]
    rows = f"SELECT * FROM (\n{source.sql}\n) AS serin_all WHERE {' AND '.join(bounds)}"  # noqa: S608 (quoted)
    shutil.rmtree(scratch, ignore_errors=True)
    file = read_sql(_TABLE, source.model_copy(update={"sql": rows}), scratch)
    count = pq.read_metadata(file.path).num_rows
    if not count:
        return None
    typed = _types_before(pq.read_schema(file.path), {} if last is None else last.columns)
    new = NewRows(pieces=(), source=name, upto=newest, since=first, seen=before + count)
    return _with_pieces([file], lambda _: typed, new)


def _types_before(schema: pa.Schema, before: Mapping[str, str]) -> Constants:
    """Columns of other types than in the run before: SQLite knows none where there are no values."""
    changed = [each.name for each in schema if before.get(each.name, str(each.type)) != str(each.type)]
    return tuple(
        (name, pa.type_for_alias(before[name]), None) for name in changed if before[name] in _PLAIN_TYPES
    )


def _lower(column: str, after: int | str | None, first: int | str | None) -> list[str]:
    return [
        f"{quoted(column)} {sign} {literal(value)}"
        for sign, value in ((">", after), (">=", first))
        if value is not None
    ]


def _extent(
    source: SqlTable, last: ScoredRun | None, first: int | str | None
) -> tuple[int | str | None, int, int, int]:
    """The largest new value (None: there is none), how many rows have none, and how many are among those up to the
    last run's: from `first` on, and from where the last run began."""
    column, after = quoted(source.order_by[0]), None if last is None else last.upto
    new = " AND ".join(_lower(source.order_by[0], after, first)) or f"{column} IS NOT NULL"
    old = "1 = 0" if after is None else f"{column} <= {literal(after)}"
    before, known = (
        " AND ".join([old, *_lower(source.order_by[0], None, since)])
        for since in (first, None if last is None else last.since)
    )
    statement = (
        f"SELECT max(CASE WHEN {new} THEN {column} END) AS newest, count(*) - count({column}) AS nulls, "  # noqa: S608 (quoted)
        f"count(CASE WHEN {before} THEN 1 END) AS before, count(CASE WHEN {known} THEN 1 END) AS known "
        f"FROM (\n{source.sql}\n) AS serin_all"
    )
    with connected(source.connection) as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        newest, *counts = cursor.fetchone()
    nulls, up_to, seen = map(int, counts)
    return _value(source, newest), nulls, up_to, seen


def _typed(source: SqlTable, since: str | None, after: int | str | None) -> int | str | None:
    """What --since says, as a value of the column."""
    if since is None:
        return None
    if after is None:
        statement = f"SELECT max({quoted(source.order_by[0])}) FROM (\n{source.sql}\n) AS serin_all"  # noqa: S608 (quoted)
        with connected(source.connection) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            after = _value(source, cursor.fetchone()[0])
    if not isinstance(after, int):
        return since
    if not re.fullmatch("-?[0-9]+", since):
        raise _refusal(source, f"--since {since}: {source.order_by[0]} is an integer")
    return int(since)


def _value(source: SqlTable, value: object) -> int | str | None:
    """The value as a watermark keeps it."""
    if value is None or (isinstance(value, int | str) and not isinstance(value, bool)):
        return value
    if isinstance(value, date):  # also a time
        return str(value)
    column, kind = source.order_by[0], type(value).__name__
    reason = f"{column} is {kind}; the first order_by column must be an integer, a text, a date or a time"
    raise _refusal(source, f"{reason}: convert it in the query")


def _same_source(source: str | LongForm, name: str, runs: Iterable[ScoredRun]) -> ScoredRun | None:
    """The last run. ScoringRefused when runs are of another source: which of its rows are new would be a guess."""
    last = None
    for last in runs:
        if last.source != name:
            reason = "the target has the scores of another table or query; score into another target"
            raise _refusal(source, reason)
    return last


def _number(source: DeltaTable, since: str | None) -> int | None:
    if since is None or re.fullmatch("[0-9]+", since):
        return None if since is None else int(since)
    raise _refusal(
        source, f"--since {since}: of a Delta table it is the first version to be scored, such as 12"
    )
