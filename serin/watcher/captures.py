"""What the command does with recorded requests, of this home and of all hosts that share a store: reads those of all
hosts, deletes rows, and what is too old or has no model any more."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from serin.expressions import ExpressionError, parse
from serin.formats.captures import captures_folder, versions_captured
from serin.formats.cluster.host_report import PREFIX as HOSTS
from serin.formats.forget_requests import Applied, ForgetRequest, read_applied, read_requests, write_request
from serin.formats.serving.ring import ring_files
from serin.formats.shared_captures import RECORDS
from serin.machine import environment
from serin.monitoring.capture.all_hosts import AllHosts, SharedRecords
from serin.monitoring.capture.counters import models_captured
from serin.monitoring.capture.forget import Deletion, check_columns, forget, matches
from serin.monitoring.capture.retention import HomeHours, Hours, StoreHours, delete_versions
from serin.pipeline import labels
from serin.store.artifacts import Release
from serin.store.retention import Garbage
from serin.store.store import Store
from serin.watcher.capture_duty import capture_settings, expire_by, new_recorder
from serin.watcher.event_keys import forget_events

_BUFFERED_S = 0.5  # an answer is in its ring a moment after the client has it
_POLL_S: Final = 1.0


def record_all(home: Path, model: str) -> None:
    """Records every request of `model` that was answered before this call. The watcher may do the same at the same
    time. Raises OSError when records cannot be written."""
    if not ring_files(home):
        return
    time.sleep(_BUFFERED_S)
    recorder = new_recorder(home, Store.open())
    outcome = recorder.record(time.time())
    recorder.close()
    if model in outcome.failed:
        raise outcome.failed[model]


def forget_rows(home: Path, model: str, where: str, *, remove: bool) -> Deletion:
    """Deletes the recorded rows for which `where` is true, their labels, and the events of online windows of their
    keys. Call `record_all` first.

    Raises ExpressionError also for a column that is masked in every version: its rows could not be found, which must
    not look as if there were none. A column that some versions mask is in `unread`.
    """
    masked = check_not_masked(model, where, versions_captured(home, model))
    hours = HomeHours(home, model)
    if not remove:
        return forget(hours, where, remove=False)
    of_rows = [lambda version, rows: labels.forget(model, {version: rows})]
    found = forget(hours, where, also=[*of_rows, forget_events(home, model, where)])
    labels.count_again(model)
    return replace(found, unread=tuple(sorted({*found.unread, *masked})))


def check_not_masked(model: str, where: str, versions: Iterable[int]) -> list[str]:
    """Returns the columns of `where` that some of the versions mask. ExpressionError for one that all of them mask."""
    masked = _masked_in(model, parse(where).columns, versions)
    if hidden := [name for name, everywhere in masked.items() if everywhere]:
        raise ExpressionError(
            f"{where!r}: the values of {', '.join(map(repr, hidden))} are not recorded (monitoring.capture.mask), so "
            "no row can be found by them; use another column, _id or _client_id"
        )
    return list(masked)


def _masked_in(model: str, columns: Iterable[str], versions: Iterable[int]) -> dict[str, bool]:
    """Returns those of `columns` that a recorded version masks, each with whether all of them do."""
    settings = capture_settings(Store.open())
    known = [found for version in versions if (found := settings(Release(model=model, version=version)))]
    counts = {name: sum(name in found.mask for found in known) for name in columns}
    return {name: count == len(known) for name, count in counts.items() if count}


def delete_records(home: Path, model: str, versions: list[int], *, whole: bool) -> int:
    """Deletes the records of versions that were deleted, also from the shared store; of the `whole` model when none is
    left. What is still in a ring is dropped when it is read. All hosts are asked to delete theirs. Returns the bytes
    here and in the store."""
    size = delete_versions(HomeHours(home, model), versions)
    records = shared_records(home)
    if records is None or model not in records.models():
        _remove_rest(home, None, [model] if whole else [])
        return size
    names = [
        Release(model=model, version=version, edition=edition, baseline=baseline).name
        for version in versions
        for edition in Store.open().edition_numbers(model, version)
        for baseline in (False, True)
    ]
    ask_to_forget(records, model, " or ".join(f"_release = '{name}'" for name in names))
    size += delete_versions(StoreHours(records, model), versions)
    _remove_rest(home, records, [model] if whole else [])
    records.drop_outdated(model, [])
    return size


def _remove_rest(home: Path, records: SharedRecords | None, models: Iterable[str]) -> None:
    """Removes what else there is of models whose records were deleted."""
    for model in models:
        shutil.rmtree(captures_folder(home, model), ignore_errors=True)
        if records is not None:
            for key in records.files.keys(f"{RECORDS}{model}/"):
                records.files.remove(key)


def expired_records(home: Path, store: Store, *, remove: bool) -> list[Garbage]:
    """What the watchers would delete as well, here and in the shared store: records beyond `monitoring.capture.keep`
    and `max_size`, and all of models that are not in the store."""
    settings, known, found = capture_settings(store), set(store.models()), list[Garbage]()
    records = shared_records(home)
    places: list[tuple[str, Hours]] = [("records", HomeHours(home, model)) for model in models_captured(home)]
    if records is not None:
        places += [("shared records", StoreHours(records, model)) for model in records.models()]
    for kind, hours in places:
        if hours.model in known:
            size = expire_by(settings, hours, time.time(), remove=remove)
        else:
            size = delete_versions(hours, remove=remove)
        if size:
            found.append(Garbage(kind=kind, name=hours.model, bytes=size))
    if remove:
        _remove_rest(home, records, {hours.model for _, hours in places} - known)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetState:
    """A request and what each host did. `waiting`: hosts that have not applied it yet."""

    request: ForgetRequest
    applied: dict[str, Applied]
    waiting: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        applied = {host: asdict(found) for host, found in sorted(self.applied.items())}
        return {**asdict(self.request), "applied": applied, "waiting": list(self.waiting)}


def shared_records(home: Path) -> SharedRecords | None:
    """The records in the store that SERIN_STORE names; None where hosts cannot share them."""
    url = environment.shared_store_url()
    if url is None:
        return None
    return SharedRecords.of(Store(url), home)


def all_hosts(home: Path, records: SharedRecords | None, model: str) -> AllHosts:
    """The records of a model on all hosts. `records` may be None: of this home alone."""
    shared = records if records is not None and model in records.models() else None
    return AllHosts(home, shared, environment.host(), model)


def check_request(home: Path, records: SharedRecords, model: str, where: str) -> None:
    """Raises ExpressionError for a condition that no record can be compared with."""
    everywhere, expression = all_hosts(home, records, model), parse(where)
    types = everywhere.columns()
    check_columns(expression, types)
    matches(expression, pa.table({name: pa.nulls(1, kind) for name, kind in types.items()}))
    check_not_masked(model, where, everywhere.versions)


def ask_to_forget(records: SharedRecords, model: str, where: str) -> ForgetRequest:
    """Asks all hosts to delete the rows for which `where` is true. They do, also those that are away now."""
    by = environment.actor()
    return write_request(records.files, model, where, t=time.time(), by=by)


def forget_states(records: SharedRecords, model: str, only: int | None = None) -> list[ForgetState]:
    """The requests about a model, oldest first, or one of them."""
    applied = read_applied(records.files, model)
    hosts = _hosts(records, model)
    return [
        ForgetState(
            request=request,
            applied=(found := applied.get(request.seq, {})),
            waiting=tuple(sorted(hosts - found.keys())),
        )
        for request in read_requests(records.files, model)
        if only is None or request.seq == only
    ]


def wait_until_forgotten(
    records: SharedRecords,
    request: ForgetRequest,
    wait_s: float,
    *,
    on_wait: Callable[[Iterable[str]], None] = lambda _: None,
) -> ForgetState:
    """Returns the state once all hosts have applied the request, or after `wait_s` seconds."""
    deadline, told = time.monotonic() + wait_s, False
    while True:
        (state,) = forget_states(records, request.model, request.seq)
        if not state.waiting or time.monotonic() >= deadline:
            return state
        if not told:
            on_wait(state.waiting)
            told = True
        time.sleep(_POLL_S)


def _hosts(records: SharedRecords, model: str) -> set[str]:
    """The hosts that may have records: those that have uploaded some, and those with an agent."""
    reports = (key.removeprefix(HOSTS) for key in records.files.keys(HOSTS))
    agents = {name.partition("/")[0] for name in reports if name.endswith("/agent.json")}
    return agents | set(records.files.names(f"{RECORDS}{model}/"))
