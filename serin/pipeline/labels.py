"""Labels for a model's answers: read from a file or a frame, stored, and looked up among the recorded requests."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from serin.errors import BundleBroken, LabelsUnfit, NotFound, SpecError
from serin.formats.schema import read_schema
from serin.machine import environment
from serin.monitoring.capture.read import records_in
from serin.monitoring.quality import follow
from serin.monitoring.quality.keys import KeyIndex
from serin.monitoring.quality.labels import Added, Columns, TruthOf, add_labels
from serin.monitoring.quality.scan import Versions, Watched, answer_of, search
from serin.store.artifacts import Bundle
from serin.store.packages import stored_spec
from serin.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelsAdded:
    """The outcome of adding labels. `matched`: about a recorded row; `unknown`: about none so far, kept until one is
    recorded; `ambiguous`: by a client's id that several requests have; `unclear`: without a row number for a request
    of several rows; `beyond`: for a row that the recorded request does not have. `stored` is 0 when the same table was
    added just before; `joined_later`: how many of them another process joins. `mixed`: some calls named a time column
    and others did not, so that times and arrivals are compared with each other."""

    rows: int
    stored: int
    missing: int
    without_key: int
    repeated: int
    matched: int
    unknown: int
    ambiguous: int
    unclear: int
    beyond: int
    key: str
    mixed: bool
    joined_later: int = 0


def add(
    bundle: Bundle, table: pa.Table, columns: Columns, *, deliver: Callable[[bytes], None] | None = None
) -> LabelsAdded:
    """Stores labels for the answers of a model. LabelsUnfit when they do not fit it; then nothing is stored. `deliver`:
    takes the file of labels where another process stores it, and joins them with the recorded rows."""
    of = truth_of(bundle)
    capture = stored_spec(Path(bundle.path)).monitoring.capture
    if masked := [name for name in columns.on if name in (*capture.mask, *capture.drop)]:
        reason = "is masked or dropped in the records (monitoring.capture): labels cannot be joined by it"
        raise LabelsUnfit(model=bundle.model, column=masked[0], reason=reason)
    if deliver is None:
        home = environment.home()
        return _looked_up(home, bundle.model, add_labels(home, of, table, columns, time.time()))
    with tempfile.TemporaryDirectory() as scratch:
        added = add_labels(Path(scratch), of, table, columns, time.time())
        if added.file is not None:
            deliver(added.file.path.read_bytes())
    found = _looked_up(Path(), bundle.model, replace(added, file=None))
    return replace(found, stored=added.stored, joined_later=added.stored)


def truth_of(bundle: Bundle) -> TruthOf:
    """What a version predicts. LabelsUnfit for a model whose target is not known."""
    spec = stored_spec(Path(bundle.path))
    if not spec.has_target:
        reason = "cannot be read: the model's spec has no data.target, so it is not known what a label means"
        raise LabelsUnfit(model=bundle.model, column="", reason=reason)
    return TruthOf(model=bundle.model, data=spec.data, schema=read_schema(Path(bundle.path)))


def _looked_up(home: Path, model: str, added: Added) -> LabelsAdded:
    counts = dict.fromkeys(("matched", "ambiguous", "unclear", "beyond"), 0)
    if added.file is not None:
        labels = added.file.read()
        versions, sources = watched_versions(Store.open(), model), records_in(home)
        *_, found = search(sources, model, added.file, labels, versions, KeyIndex())
        parts = (found.labels, found.ambiguous, found.unclear, found.beyond)
        counts = dict(zip(counts, map(len, parts), strict=True))
    return LabelsAdded(
        **counts,
        rows=added.rows,
        stored=added.stored if added.file is not None else 0,
        missing=added.missing,
        without_key=added.without_key,
        repeated=added.repeated,
        unknown=max(0, added.stored - sum(counts.values())) if added.file is not None else 0,
        key=str(added.key),
        mixed=added.mixed,
    )


def forget(model: str, rows: Mapping[int, pa.Table], home: Path | None = None) -> int:
    """Deletes the labels of recorded rows (by version) that are being deleted. Returns their number. `home`: with the
    labels; None: the environment's."""
    return follow.forget_rows(home or environment.home(), model, rows, watched_versions(Store.open(), model))


def count_again(model: str, home: Path | None = None) -> None:
    """Has the recorded rows that are left counted again, after some were deleted."""
    follow.count_again(home or environment.home(), model)


def watched_versions(store: Store, model: str) -> Versions:
    """What is known of each version of a model. A version never changes, so it is read once."""

    @functools.cache
    def watched(version: int) -> Watched | None:
        try:
            folder = Path(store.bundle(model, version).path)
            spec, schema = stored_spec(folder), read_schema(folder)
        except (NotFound, SpecError, BundleBroken, OSError):
            return None
        if not spec.has_target or answer_of(schema) is None:
            return None
        return Watched(version=version, schema=schema, data=spec.data, segments=spec.export.segments)

    return watched
