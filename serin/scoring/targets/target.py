"""What a target of scheduled scoring is: a table that grows by one run at a time, each with its watermark.

The rows of a run are made as files, in `Target.folder`, by code that all targets share (scoring/bulk.py):

    FOLDER/run-00002/part-00000.parquet ...    the rows of a run with their scores
    FOLDER/run-00002/_SUCCESS                  the watermark of the run
    FOLDER/run-00002/_RECORDED                 its rows are among the recorded requests

Rows and watermark become part of the target in one step: the rename of the folder, a commit of a Delta table, or a
transaction of a database. The target alone knows which runs it has: a process may end at any point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import ScoringRefused
from serin.machine.documents import parse_json
from serin.machine.typed_json import Document

SUCCESS, RECORDED = "_SUCCESS", "_RECORDED"
_BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRun(Document, form="serin.scored", omit=("source", "upto", "since", "seen")):
    """The watermark of a run.

    `files`: with the mark by which a change is seen. `source`: the Delta table or the query, when rows are not named by
    their files. `upto`: its version, or the largest value of the query's first order_by column. `seen`: how many rows
    the query had up to there, from `since` on. `columns`: of the result, with their types. `t`: seconds since 1970.
    """

    release: str
    t: float
    rows: int
    files: dict[str, str]
    source: str = ""
    upto: int | str | None = None
    since: int | str | None = None
    seen: int | None = None
    columns: dict[str, str] = field(default_factory=dict)


class Target(Protocol):
    @property
    def name(self) -> str:
        """What messages call it. It holds no secret."""

    @property
    def folder(self) -> Path:
        """Where runs are made."""

    def read_runs(self) -> dict[int, ScoredRun]:
        """The watermarks of the runs in the target, by number, oldest first. ScoringRefused for a table that someone
        else has made."""

    def commit(self, number: int, done: ScoredRun) -> None:
        """Adds the finished run to what `read_runs` has read, in one step. ScoringRefused when the target cannot be
        written, or when another run has come first."""


def run_name(number: int) -> str:
    return f"run-{number:05d}"


def run_number(name: str) -> int:
    """The number in a name of `run_name`; 0 for another name."""
    found = re.fullmatch(r"run-([0-9]+)", name)
    return int(found[1]) if found else 0


def read_watermark(place: object, content: bytes | str) -> ScoredRun:
    """Returns a watermark. FileBroken when it is damaged."""
    advice = "restore it, or score into another target: without it the rows of a run could be scored twice"
    data = content.encode() if isinstance(content, str) else content
    return parse_json(str(place), data, ScoredRun.from_json, advice=advice)


def run_folders(folder: Path) -> dict[int, Path]:
    """The runs whose files are in a folder, by number, oldest first."""
    found = {run_number(path.name): path for path in folder.glob("run-*")}
    return {number: found[number] for number in sorted(found) if number}


def finished_run(folder: Path, number: int) -> ScoredRun | None:
    """The watermark of a run whose files are all there."""
    path = folder / run_name(number) / SUCCESS
    return read_watermark(path, path.read_bytes()) if path.is_file() else None


def batches_of(run: Path) -> pa.RecordBatchReader:
    """Returns the rows of a finished run, a few at a time."""
    parts = sorted(run.glob("part-*.parquet"))
    schema = pq.read_schema(parts[0])

    def batches() -> Iterator[pa.RecordBatch]:
        for part in parts:
            with pq.ParquetFile(part) as file:
                for batch in file.iter_batches(_BATCH_ROWS):  # writers take columns by their place
                    yield batch.select(schema.names)

    return pa.RecordBatchReader.from_batches(schema, batches())


def check_complete(target: Target, found: Mapping[int, ScoredRun], newest: int) -> None:
    """Raises ScoringRefused when the watermark of one of the runs up to the newest is gone."""
    gone = sorted(set(range(1, newest + 1)) - found.keys())
    if gone or len(found) != newest:
        what = f"the watermark of run {gone[0]} is gone" if gone else "it has more watermarks than runs"
        reason = f"{what}; restore it, or score into another table: rows could be scored twice"
        raise ScoringRefused(target=target.name, reason=reason)


def check_committed(target: Target, number: int, done: ScoredRun, error: Exception, reason: str) -> None:
    """After an error of a commit: raises ScoringRefused when the run is not in the target."""
    now = target.read_runs().get(number)
    if now is None:
        what = f"it cannot be written: {reason}; nothing of this run is there"
        raise ScoringRefused(target=target.name, reason=what) from error
    if now != done:
        what = "another run has written it at the same time; run again"
        raise ScoringRefused(target=target.name, reason=what) from error
