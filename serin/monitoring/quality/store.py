"""Labels and labelled rows on disk.

Labels are stored as they arrived: labels/<model>/<sequence>.parquet, one file for each call, whole or not at all. A
file holds the labels' keys and truths and nothing else of the table it came from. Files are never changed, except that
a person's labels are deleted. `sequence` sorts by arrival.

Labelled rows: watch/quality/<model>/<version>/<day>.parquet (UTC), with what metrics need and no more. A row has one
label, the newest by `when`. A file is replaced as a whole, and adding the same rows again changes nothing, so work that
was interrupted is simply done again.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serin.errors import StoreNotWritable
from serin.formats.captures import open_part
from serin.formats.schema import INT64_NULL
from serin.machine.durable import make_private, replacing, sync, write_whole
from serin.machine.locks import locked
from serin.monitoring.quality.keys import ID, ROW, TIME, Key
from serin.spec.names import valid_model_name

FORMAT, VERSION = "serin.labels", 1
KEY, LABEL, WHEN, ARRIVED, ONLY_ROW = "key", "label", "when", "arrived", "only_row"
"""Columns: the joined key, the truth, the time that decides between corrections (arrival unless a column names it),
the arrival (both in microseconds since 1970), and whether the label named no row."""

_META: Final = b"serin.labels"
_DAY_US: Final = 86_400_000_000
_LAST: Final = 10**17  # microseconds since 1970: the names of files have so many digits
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


def take_label_file(home: Path, model: str, content: bytes) -> None:
    """Stores a file of labels that another machine wrote; one that is there already is not stored again. Raises
    ValueError for anything else."""
    arrived = _arrival(content)
    with following(home, model):
        make_private(home / "labels")
        folder = make_private(labels_folder(home, model))
        scratch = folder / f".taken-{secrets.token_hex(6)}"
        try:
            write_whole(scratch, content)
            taken, files = described(scratch), label_files(home, model)
            if files and files[-1].digest == taken.digest:
                return
            moment = max(arrived, _moment(files[-1].sequence) + 1 if files else 0)
            scratch.rename(folder / f"{moment:017d}-{secrets.token_hex(3)}.parquet")
            sync(folder)
        finally:
            scratch.unlink(missing_ok=True)


def _arrival(content: bytes) -> int:
    """Returns when the labels of a file arrived. Raises ValueError for what is not one: Arrow raises many errors,
    also OSError."""
    try:
        with pq.ParquetFile(pa.BufferReader(content)) as file:
            missing = {KEY, LABEL, WHEN, ARRIVED, ONLY_ROW} - set(file.schema_arrow.names)
            if missing or _META not in (file.metadata.metadata or {}):
                raise ValueError(f"no columns {sorted(missing)}" if missing else "no description")
            arrived = file.read([ARRIVED]).column(ARRIVED)[0].as_py()
    except (pa.ArrowException, OSError, IndexError, ValueError) as error:
        raise ValueError(f"this is not a file of labels: {error}") from error
    if type(arrived) is not int or not 0 <= arrived < _LAST:
        raise ValueError(f"{arrived!r} is not when labels arrived")
    return arrived


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
        gone += _rewrite(file.path, with_description(table, file), keep(file, table))
    return gone


def _rewrite(path: Path, table: pa.Table, keep: npt.NDArray[np.bool_]) -> int:
    """Replaces a file by one with the rows of `table` for which `keep` is true. Returns how many it loses."""
    if not keep.any():
        path.unlink(missing_ok=True)
        sync(path.parent)
    elif not keep.all():
        write_table(path, table.filter(pa.array(keep)))
    return int(np.count_nonzero(~keep))


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
    with replacing(path) as scratch:
        scratch.touch(mode=0o600, exist_ok=False)
        pq.write_table(table, scratch, compression="zstd")
        sync(scratch)
    sync(path.parent)


def _moment(sequence: str) -> int:
    """The arrival, in microseconds since 1970."""
    return int(sequence[:17])


def _digest(labels: pa.Table, key: Key, expression: str) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, labels.schema) as writer:
        writer.write_table(labels.combine_chunks())
    return hashlib.sha256(f"{key}\n{expression}\n".encode() + sink.getvalue().to_pybytes()).hexdigest()


def day_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


class JoinedRows:
    """The labelled rows of a model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, version: int, rows: pa.Table) -> pa.Table:
        """Adds labelled rows. Returns those that had no label before, each once."""
        fresh = []
        for day, part in _by_day(rows):
            path = self._folder / str(version) / f"{day}.parquet"
            had = pq.read_table(path) if path.is_file() else None
            both = part if had is None else pa.concat_tables([had, part], promote_options="permissive")
            codes = _row_codes(both)
            places = newest_places(both, codes)
            kept = both.take(pa.array(places))
            order = pc.sort_indices(kept, [(TIME, "ascending"), (ID, "ascending"), (ROW, "ascending")])
            places, kept = places[order.to_numpy()], kept.take(order)  # the same numbers whatever the arrival
            known = np.zeros(len(places), bool)
            known[codes[: had.num_rows if had is not None else 0]] = True
            fresh.append(kept.filter(pa.array(~known[codes[places]])))
            if had is None or not kept.equals(had):
                make_private(path.parent)
                write_table(path, kept)
        return pa.concat_tables(fresh, promote_options="permissive")

    def versions(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def read(
        self, version: int, columns: Sequence[str] | None = None, *, most: int | None = None
    ) -> pa.Table | None:
        """The labelled rows of a version, oldest day first; of more than `most`, the newest days that fit."""
        tables: list[pa.Table] = []
        rows = 0
        for path in reversed(self._files(version)):
            with open_part(path) as file:
                known = file.schema_arrow.names
                table = file.read(None if columns is None else [n for n in columns if n in known])
            if most is not None and tables and rows + table.num_rows > most:
                break
            tables.append(table)
            rows += table.num_rows
        return pa.concat_tables(tables[::-1], promote_options="permissive") if tables else None

    def delete_before(self, moment: float) -> None:
        for version in self.versions():
            for path in self._files(version):
                if path.stem < day_of(moment):
                    path.unlink(missing_ok=True)

    def filter(self, keep: Callable[[pa.Table], npt.NDArray[np.bool_]]) -> int:
        """Deletes the rows that `keep` says no to. Returns their number."""
        gone = 0
        for path in (path for version in self.versions() for path in self._files(version)):
            table = pq.read_table(path)
            gone += _rewrite(path, table, keep(table))
        return gone

    def _files(self, version: int) -> list[Path]:
        folder = self._folder / str(version)
        return sorted(folder.glob("*.parquet")) if folder.is_dir() else []


def _by_day(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    days = np.asarray(rows.column(TIME).cast(pa.int64()), np.int64) // _DAY_US
    for day in np.unique(days).tolist():
        chosen = rows if (days == day).all() else rows.filter(pa.array(days == day))
        yield day_of(day * 86_400.0), chosen


def _row_codes(rows: pa.Table) -> npt.NDArray[np.int64]:
    """A number for each different row of a request, from 0."""
    ids = rows.column(ID).cast(pa.string()).fill_null("")
    keys = pc.binary_join_element_wise(ids, rows.column(ROW).cast(pa.string()), "\x1f").combine_chunks()
    return np.asarray(keys.dictionary_encode().indices, np.int64)


def newest_places(labels: pa.Table, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The places of the newest label of each code: the one with the latest `when`, of equal ones the last."""
    order = np.arange(labels.num_rows)
    if labels.column(WHEN).null_count < labels.num_rows:
        order = np.argsort(np.asarray(labels.column(WHEN).fill_null(INT64_NULL)), kind="stable")
    last = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    last[codes[order]] = order  # a later one overwrites an earlier one
    return np.sort(last)
