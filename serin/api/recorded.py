"""Why recorded requests were answered as they were: the contributions of their raw columns, by the release that gave
the answer. Records are read wherever they are, and the answer is computed again in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.api.explanation import OWN, Explanation, in_frame
from serin.errors import ExplanationRefused, MonitoringError, NotFound, RequestUnknown
from serin.expressions import parse
from serin.formats.captures import ANSWER, column_names
from serin.formats.explain import FOLDER, read_explain
from serin.formats.schema import Schema
from serin.formats.serving.lots import is_drawn
from serin.formats.wire import Array
from serin.monitoring.capture.all_hosts import AllHosts
from serin.monitoring.capture.columns import recorded_answers
from serin.monitoring.capture.forget import check_columns, rows_where
from serin.monitoring.capture.read import alike, hour_tables
from serin.serving.triton.verify import allowed_difference, rows_near
from serin.spec.stored import stored_capture
from serin.store.artifacts import Bundle, Release
from serin.store.store import Store
from serin.store.trust import find_trusted
from serin.watcher.capture_duty import capture_settings
from serin.watcher.captures import check_not_masked

if TYPE_CHECKING:
    import pandas as pd

_BATCH_ROWS: Final = 1 << 14  # of records that are read at a time
_PIECE_ROWS: Final = 1 << 12  # that are explained at a time
_MOST_OPEN: Final = 4  # releases whose models are in memory
_OWN: Final = ("_id", "_row", "_t", "_release")
_TAKEN: Final = (*_OWN, "output", "recorded", "agrees", "masked")  # names in a table of reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Records that arrived from `since` to before `until`, in seconds since 1970, of one version or of all."""

    version: int | None = None
    since: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reasons:
    """Recorded rows that one release answered, with the contributions to each answer.

    `recorded` and `computed` are [rows, outputs]: the answer in the record, and the one that the release's graph gives
    for the recorded columns. `agrees`: for each row whether the two are the same within the tolerance that the release
    was verified with. `hidden`: request columns whose values were not recorded, which are null in `computed`: masked
    or dropped by the spec. `affected`: columns that the model looks up or derives from those.
    """

    release: Release
    rows: pa.Table
    explanation: Explanation
    recorded: Array
    computed: Array
    agrees: Array
    hidden: Mapping[str, str]
    affected: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.explanation)

    @property
    def columns(self) -> list[str]:
        """The raw columns of its contributions."""
        return list(self.explanation.sources)

    def record(self, row: int) -> dict[str, Any]:
        """The id, the number in the request, the time and the release of a row, as recorded."""
        return {name: self.rows.column(name)[row].as_py() for name in _OWN}

    def difference(self, row: int) -> str:
        """Says how the answer that was computed again differs from the recorded one; empty when it does not."""
        if self.agrees[row]:
            return ""
        then, now = (
            ", ".join(f"{each:.6g}" for each in answer[row]) for answer in (self.recorded, self.computed)
        )
        why = "the recorded columns are not all that made the answer, or another computation gave it"
        if self.hidden:
            words = ", ".join(f"{name} is {how}" for name, how in self.hidden.items())
            why = f"{words}, so null in what is computed now"
        return f"the recorded answer is {then}, computed again it is {now} ({why})"

    def table(self, columns: Iterable[str]) -> pa.Table:
        """One row for each row and output: its record, what each of `columns` adds (null for one that the release does
        not have), base, margin, score, and whether the score is the recorded one. ExplanationRefused for a release
        with other columns."""
        if not set(self.columns) <= (wanted := dict.fromkeys(columns)).keys():
            reason = "it began to answer while the records were read; do it again, with --until"
            raise ExplanationRefused(release=self.release.name, reason=reason)
        frame = self.explanation.frame
        outputs = self.recorded.shape[1]
        found: dict[str, Any] = {
            name: self.rows.column(name).take(pa.array(np.repeat(np.arange(len(self)), outputs)))
            for name in _OWN
        }
        names = frame.index.get_level_values("output").to_list() if outputs > 1 else ["score"] * len(self)
        found["output"] = pa.array(names, pa.string())
        for name in wanted:
            there = name in self.columns
            kept = pa.array(frame[in_frame(name)].to_numpy()) if there else pa.nulls(len(frame), pa.float64())
            found[f"{name} (column)" if name in _TAKEN else in_frame(name)] = kept
        found |= {name: pa.array(frame[name].to_numpy()) for name in OWN}
        found["recorded"] = pa.array(self.recorded.reshape(-1))
        found["agrees"] = pa.array(np.repeat(self.agrees, outputs))
        found["masked"] = pa.repeat(pa.scalar(", ".join(self.hidden) or None, pa.string()), len(frame))
        return pa.table(found)


class RecordedAnswers:
    """The recorded answers of a model. `records`: of all hosts that have some."""

    def __init__(self, model: str, records: AllHosts, store: Store) -> None:
        self._model, self._records, self._store = model, records, store
        self._open: dict[Release, _Open] = {}

    def find(self, request: str, period: Period) -> pa.Table:
        """The recorded rows of one request, by their number. RequestUnknown when there are none."""
        for place in self._places(period, newest_first=True):
            ids = (
                table.column("_id") for table in hour_tables(place, columns=["_id"], batch_rows=_BATCH_ROWS)
            )
            if any(pc.any(pc.equal(some, request)).as_py() for some in ids):
                tables = hour_tables(place, period.since, period.until, batch_rows=_BATCH_ROWS)
                rows = [table.filter(pc.equal(table.column("_id"), request)) for table in tables]
                found = alike(rows).sort_by("_row")
                if found.num_rows:
                    return _each_once(found)
        raise self._unknown(request, period)

    def where(
        self, condition: str, period: Period, columns: Iterable[str] | None = None
    ) -> Iterator[pa.Table]:
        """The recorded rows for which a condition is true, some at a time; all columns or some. ExpressionError when it
        cannot be computed."""
        expression, known = parse(condition), self._known
        check_columns(expression, known)
        check_not_masked(self._model, condition, self._records.versions)
        wanted = None if columns is None else list(dict.fromkeys(["_row", *columns, *expression.columns]))
        for place in self._places(period):
            for table in hour_tables(place, period.since, period.until, wanted, batch_rows=_BATCH_ROWS):
                true, _ = rows_where(expression, table, known)
                rows = table.filter(pa.array(true))
                for at in range(0, rows.num_rows, _PIECE_ROWS):
                    yield rows.slice(at, _PIECE_ROWS)

    def columns(self, condition: str, period: Period) -> list[str]:
        """The raw columns that `where` leads to, of all its releases. Refuses releases that cannot be explained."""
        releases: set[str] = set()
        for table in self.where(condition, period, columns=["_release"]):
            releases.update(table.column("_release").unique().to_pylist())
        found: dict[str, None] = {}
        for name in sorted(releases):
            opened = self._opened(Release.parse(name))
            found |= dict.fromkeys(read_explain(Path(opened.bundle.path) / FOLDER).columns.names)
        return list(found)

    def explain(self, rows: pa.Table) -> Iterator[Reasons]:
        """The reasons of recorded rows that have an answer, those of each release together. ExplanationRefused names a
        release that cannot be explained or is not in the store any more."""
        releases = rows.column("_release")
        for name in releases.unique().to_pylist():
            yield from self._opened(Release.parse(name)).reasons(rows.filter(pc.equal(releases, name)))

    def explain_request(
        self, request: str, period: Period, row: int | None = None
    ) -> tuple[list[Reasons], int]:
        """The reasons of all rows of a request, or of one, and how many it has. RequestUnknown, or ExplanationRefused
        as in `explain`."""
        rows = self.find(request, period)
        count = rows.num_rows
        if row is not None:
            numbers = rows.column("_row")
            rows = rows.filter(pc.equal(numbers, row))
            if not rows.num_rows:
                reason = f"it has no row {row}; its recorded rows are {pc.min(numbers)} to {pc.max(numbers)}"
                raise RequestUnknown(model=self._model, request=request, reason=reason)
        found = list(self.explain(rows))
        if not found:
            status = rows.column("_status")[0].as_py()
            reason = f"request {request} got status {status} and no score"
            raise ExplanationRefused(release=rows.column("_release")[0].as_py(), reason=reason)
        return found, count

    def _places(self, period: Period, *, newest_first: bool = False) -> Iterator[Path]:
        return self._records.places(
            version=period.version, since=period.since, until=period.until, newest_first=newest_first
        )

    @cached_property
    def _known(self) -> dict[str, pa.DataType]:
        return self._records.columns()

    def _opened(self, release: Release) -> _Open:
        if release not in self._open:
            while len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            try:
                bundle = find_trusted(self._store, release.model, release.label)
            except NotFound as error:
                raise ExplanationRefused(release=release.name, reason=_REMOVED) from error
            self._open[release] = _Open(release, bundle)
        return self._open[release]

    def _unknown(self, request: str, period: Period) -> MonitoringError:
        """Says why a request may have no record: not drawn, expired, or not recorded yet."""
        settings, versions = capture_settings(self._store), self._records.versions
        known = [settings(Release(model=self._model, version=version)) for version in versions]
        shares = [each.share for each in known if each is not None]
        if shares and not any(is_drawn(request, share) for share in shares):
            share = f"{max(shares):.3g} of them (monitoring.capture.share)"
            reason = f"requests are drawn by their id, {share}, and this one is not"
            return RequestUnknown(model=self._model, request=request, reason=reason)
        first = self._records.first_hour(period.version)
        hour = (
            f"the oldest records are of {first.replace('T', ' ')}h UTC" if first else "there are no records"
        )
        looked = "" if period.since is None and period.until is None else "; look without --since and --until"
        reason = (
            f"{hour} (monitoring.capture.keep); a request before has expired, a new one is there some seconds after "
            f"its answer{looked}. The id is the x-request-id of the answer, not the client's own"
        )
        return RequestUnknown(model=self._model, request=request, reason=reason)


_REMOVED = (
    "it answered the request and was removed from the store since; only the version and the edition of its lookups "
    "that gave an answer can explain it"
)


class _Open:
    """A release that explains what it answered."""

    def __init__(self, release: Release, bundle: Bundle) -> None:
        from serin.scoring.explain.explainer import Explainer  # slow to import: not to find records

        self.release, self.bundle = release, bundle
        self._explainer = Explainer(bundle.path, digest=bundle.digest)
        self._allowed = allowed_difference(Path(bundle.path))
        capture = stored_capture(Path(bundle.path))
        inputs = {column.name for column in self._explainer.schema.inputs}
        self._hidden = {
            name: why
            for why, names in (("masked", capture.mask), ("not recorded", capture.drop))
            for name in names
            if name in inputs
        }

    def reasons(self, rows: pa.Table) -> Iterator[Reasons]:
        """Of the rows that have an answer."""
        schema = self._explainer.schema
        answer = schema.outputs[-1]
        rows = rows.filter(pc.is_valid(rows.column(f"{ANSWER}{answer.name}")))
        for at in range(0, rows.num_rows, _PIECE_ROWS):
            some = rows.slice(at, _PIECE_ROWS).combine_chunks()
            inputs = self._inputs(some, schema)
            found = self._explainer.explain(inputs)
            recorded = recorded_answers(some, answer)
            assert recorded is not None, "rows without an answer are left out"
            recorded = recorded.reshape(found.score.shape)
            yield Reasons(
                release=self.release,
                rows=some,
                explanation=Explanation(found, self._shown(inputs)),
                recorded=recorded,
                computed=found.score,
                agrees=rows_near(answer.name, recorded, {answer.name: found.score}, self._allowed),
                hidden=self._hidden,
                affected=_affected(found.sources, self._hidden),
            )

    def _inputs(self, rows: pa.Table, schema: Schema) -> pa.Table:
        """The request columns of records; those that were not recorded are null."""
        names = column_names([column.name for column in schema.inputs])
        columns = {
            name: pa.nulls(rows.num_rows) if name in self._hidden else rows.column(own)
            for name, own in names.items()
            if name in self._hidden or own in rows.column_names
        }
        return pa.table(columns)

    def _shown(self, inputs: pa.Table) -> pd.DataFrame:
        """The values as people read them: what was not recorded is said to be so."""
        import pandas as pd

        return pd.DataFrame(
            {
                name: pd.Series(
                    [self._hidden[name]] * inputs.num_rows if name in self._hidden else column.to_pylist(),
                    dtype=object,
                )
                for name, column in zip(inputs.column_names, inputs.columns, strict=True)
            }
        )


def _affected(sources: Mapping[str, str], hidden: Mapping[str, str]) -> dict[str, str]:
    """The columns that are looked up by a hidden key or derived from hidden columns, and what is said of them."""
    found: dict[str, str] = {}
    for name, source in sources.items():
        kind, _, expression = source.partition(": ")
        keys = {key for key in hidden if source.startswith("lookup in ") and source.endswith(f" by {key}")}
        reads = set(parse(expression).columns) if kind == "derived" else keys
        if through := sorted(reads & hidden.keys()):
            how = "derived from" if kind == "derived" else "looked up by"
            found[name] = f"{how} {', '.join(through)}, which was not recorded"
    return found


def _each_once(rows: pa.Table) -> pa.Table:
    """Sorted rows without those that are repeated: a host that was set back to a backup may upload a row again."""
    numbers = rows.column("_row").to_numpy()
    return rows.filter(pa.array(np.append([True], numbers[1:] != numbers[:-1])))
