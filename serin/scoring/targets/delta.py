"""A Delta table as the target of scheduled scoring: each run is one commit, with its watermark.

The watermark is in the commit's information and its number is the version of an application's transaction. Two commits
of the same number are refused by Delta's own rules, wherever their writers run. The log is kept forever: without it a
later run would not know what has been scored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from serin.errors import ScoringRefused
from serin.scoring.targets.target import (
    ScoredRun,
    batches_of,
    check_committed,
    check_complete,
    read_watermark,
    run_name,
)
from serin.store.file_systems import delta_options

_APPLICATION = "serin.scored"
_NOT_IN_DELTA = (
    pa.types.is_time, pa.types.is_duration, pa.types.is_interval, pa.types.is_float16, pa.types.is_decimal256,
)  # fmt: skip
_KEEP_LOG = {"delta.enableExpiredLogCleanup": "false"}


class DeltaTarget:
    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._table: Any = None  # as `read_runs` has found it

    @property
    def name(self) -> str:
        return self._url

    @property
    def folder(self) -> Path:
        return self._folder

    def read_runs(self) -> dict[int, ScoredRun]:
        import deltalake
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            self._table = deltalake.DeltaTable(self._url, storage_options=delta_options())
            newest = self._table.transaction_version(_APPLICATION)
            commits = [] if newest is None else self._table.history()
        except TableNotFoundError:
            self._table = None
            return {}
        except (DeltaError, OSError, ValueError) as error:
            raise self._refusal(f"it cannot be read: {_line(error)}") from error
        if newest is None and self._table.metadata().name == _APPLICATION:
            return {}  # the first run was killed when it had made the table
        if newest is None:
            reason = "it was made by someone else; name a table that does not exist yet"
            raise self._refusal(reason)
        found = {
            commit["version"]: read_watermark(
                f"{self._url}, version {commit['version']}", commit[_APPLICATION]
            )
            for commit in commits
            if _APPLICATION in commit
        }
        runs = {number: found[version] for number, version in enumerate(sorted(found), 1)}
        check_complete(self, runs, newest)
        return runs

    def commit(self, number: int, done: ScoredRun) -> None:
        from deltalake import CommitProperties, Transaction, write_deltalake
        from deltalake.exceptions import DeltaError

        properties = CommitProperties(
            custom_metadata={_APPLICATION: done.dump().decode()},
            app_transactions=[Transaction(_APPLICATION, number, int(done.t * 1000))],
        )
        rows = batches_of(self._folder / run_name(number))
        if odd := [f"{each.name} is {each.type}" for each in rows.schema if not _has_type(each.type)]:
            raise self._refusal(f"Delta has no type for {', '.join(odd)}; convert such columns of the rows")
        try:
            if self._table is None:  # two first commits at once would both succeed: the first makes no rows
                write_deltalake(
                    self._url,
                    rows.schema.empty_table(),
                    mode="ignore",
                    name=_APPLICATION,
                    configuration=_KEEP_LOG,
                    storage_options=delta_options(),
                )
                if number in self.read_runs():
                    raise self._refusal("another run has written it at the same time; run again")
            # to the version that was read: a commit in between is seen
            write_deltalake(self._table, rows, mode="append", commit_properties=properties)
        except (DeltaError, OSError, ValueError) as error:
            check_committed(self, number, done, error, _line(error))

    def _refusal(self, reason: str) -> ScoringRefused:
        return ScoringRefused(target=self._url, reason=reason)


def open_delta(url: str, folder: Path) -> DeltaTarget:
    try:
        import deltalake  # noqa: F401
    except ImportError as error:
        reason = "the package deltalake is missing; pip install 'serin[delta]'"
        raise ScoringRefused(target=url, reason=reason) from error
    return DeltaTarget(url, folder)


def _has_type(kind: pa.DataType) -> bool:
    """Whether Delta has this type: for others deltalake raises a plain Exception."""
    if any(is_one(kind) for is_one in _NOT_IN_DELTA):
        return False
    return all(_has_type(kind.field(number).type) for number in range(kind.num_fields))


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
