"""Labels on disk, as they arrived: labels/<model>/<sequence>.parquet, one file for each call, whole or not at all.

A file holds the labels' keys and truths and nothing else of the table it came from. Files are never changed, except
that a person's labels are deleted (`forget`). `sequence` sorts by arrival.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from serin.errors import StoreNotWritable
from serin.formats.captures import open_part
from serin.machine.durable import sync
from serin.machine.locks import locked
from serin.machine.private import make_private
from serin.monitoring.quality.keys import Key
from serin.spec.names import valid_model_name

FORMAT, VERSION = "serin.labels", 1
KEY, LABEL, WHEN, ARRIVED, ONLY_ROW = "key", "label", "when", "arrived", "only_row"
"""Columns: the joined key, the truth, the time that decides between corrections (arrival unless a column names it),
the arrival (both in microseconds since 1970), and whether the label named no row."""

_META: Final = b"serin.labels"
_FILE: Final = re.compile(r"\d{17}-[0-9a-f]{6}\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFile:
    """`expression`: the target that the labels are the truth of."""

    path: Path
    key: Key
    expression: str
    rows: int
    digest: str

    @property
    def sequence(self) -> str:
        return self.path.stem

    def read(self) -> pa.Table:
        with open_part(self.path) as file:
            return file.read().replace_schema_metadata(None)


def labels_folder(home: Path, model: str) -> Path:
    return home / "labels" / valid_model_name(model)


def quality_folder(home: Path, model: str) -> Path:
    return home / "watch" / "quality" / valid_model_name(model)


@contextmanager
def following(home: Path, model: str) -> Iterator[Path]:
    """Holds the lock of a model's labels and labelled rows. Yields the folder of the labelled rows."""
    make_private(home / "watch")
    make_private(home / "watch" / "quality")
    folder = make_private(quality_folder(home, model))
    with locked(folder / "lock"):
        yield folder


def write_labels(
    home: Path, model: str, labels: pa.Table, key: Key, expression: str, now: float
) -> LabelFile | None:
    """Stores labels (`key`, `label`, `when`, `only_row`); durable once this returns. A null `when` is the arrival.
    None: the newest file has just these, so the same call was repeated."""
    try:
        make_private(home)
        with following(home, model):
            return _write_labels(home, model, labels, key, expression, now)
    except OSError as error:
        raise StoreNotWritable(path=str(labels_folder(home, model)), reason=str(error)) from error


def _write_labels(
    home: Path, model: str, labels: pa.Table, key: Key, expression: str, now: float
) -> LabelFile | None:
    digest = _digest(labels, key, expression)
    files = label_files(home, model)
    if files and files[-1].digest == digest:
        return None
    moment = max(round(now * 1e6), _moment(files[-1].sequence) + 1 if files else 0)  # a clock may be set back
    when = labels.column(WHEN).fill_null(moment)
    arrived = pa.array(np.full(labels.num_rows, moment, np.int64))
    table = labels.set_column(labels.column_names.index(WHEN), WHEN, when).append_column(ARRIVED, arrived)
    make_private(home / "labels")
    path = make_private(labels_folder(home, model)) / f"{moment:017d}-{secrets.token_hex(3)}.parquet"
    write_table(path, table.replace_schema_metadata(_meta(key, expression, digest)))
    return described(path)


def label_files(home: Path, model: str, *, after: str = "") -> list[LabelFile]:
    """The files that arrived after the one with this sequence, oldest first."""
    folder = labels_folder(home, model)
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name) and path.stem > after)
    return [described(path) for path in paths]


def ordered_by_time(home: Path, model: str) -> bool | None:
    """Whether the labels that came last have times, and are not ordered by arrival. None: there are no labels."""
    files = label_files(home, model)
    if not files:
        return None
    table = pq.read_table(files[-1].path, columns=[WHEN, ARRIVED])
    return not table.column(WHEN).equals(table.column(ARRIVED))


def delete_old_labels(home: Path, model: str, before: float) -> int:
    """Deletes files that arrived before this time. Returns their number."""
    old = [file for file in label_files(home, model) if _moment(file.sequence) < before * 1e6]
    for file in old:
        file.path.unlink(missing_ok=True)
    return len(old)


def rewrite_labels(
    files: Iterable[LabelFile], keep: Callable[[LabelFile, pa.Table], npt.NDArray[np.bool_]]
) -> int:
    """Deletes the labels that `keep` says no to. Returns their number."""
    gone = 0
    for file in files:
        table = file.read()
        kept = keep(file, table)
        lost = int(np.count_nonzero(~kept))
        if not lost:
            continue
        gone += lost
        if not kept.any():
            file.path.unlink(missing_ok=True)
            sync(file.path.parent)
        else:
            metadata = pq.read_metadata(file.path).metadata
            write_table(
                file.path, table.filter(pa.array(kept)).replace_schema_metadata({_META: metadata[_META]})
            )
    return gone


def described(path: Path) -> LabelFile:
    with open_part(path) as file:
        footer = file.metadata
    meta = json.loads(footer.metadata[_META])
    return LabelFile(
        path=path,
        key=Key(by=tuple(meta["key"])),
        expression=meta["expression"],
        rows=footer.num_rows,
        digest=meta["digest"],
    )


def with_description(labels: pa.Table, like: LabelFile) -> pa.Table:
    """A table that `described` can read once it is a file."""
    return labels.replace_schema_metadata(_meta(like.key, like.expression, like.digest))


def _meta(key: Key, expression: str, digest: str) -> dict[bytes, bytes]:
    meta = {"format": FORMAT, "version": VERSION, "key": key.by, "expression": expression, "digest": digest}
    return {_META: json.dumps(meta).encode()}


def write_table(path: Path, table: pa.Table) -> None:
    """Writes a Parquet file completely or not at all, for its owner alone; durable once this returns."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            pq.write_table(table, file, compression="zstd")
        sync(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    sync(path.parent)


def _moment(sequence: str) -> int:
    """The arrival, in microseconds since 1970."""
    return int(sequence[:17])


def _digest(labels: pa.Table, key: Key, expression: str) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, labels.schema) as writer:
        writer.write_table(labels.combine_chunks())
    return hashlib.sha256(f"{key}\n{expression}\n".encode() + sink.getvalue().to_pybytes()).hexdigest()
