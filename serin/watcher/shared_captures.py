"""What the command does with the records of all hosts that share a store: reading them, and asking all hosts to delete
rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from serin.expressions import parse
from serin.formats.cluster.host_report import PREFIX as HOSTS
from serin.formats.forget_requests import Applied, ForgetRequest, read_applied, read_requests, write_request
from serin.formats.shared_captures import RECORDS
from serin.machine import environment
from serin.monitoring.capture.all_hosts import AllHosts
from serin.monitoring.capture.forget import check_columns, matches
from serin.monitoring.capture.shared_forget import delete_shared, expire_shared
from serin.monitoring.capture.shared_read import SharedRecords
from serin.store.artifacts import Release
from serin.store.retention import Garbage
from serin.store.store import Store
from serin.watcher.capture_duty import capture_limits, capture_settings
from serin.watcher.captures import check_not_masked

_POLL_S: Final = 1.0


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
    by = f"{environment.user()} on {environment.host()}"
    return write_request(records.files, model, where, t=time.time(), by=by)


def delete_shared_records(home: Path, model: str, versions: Sequence[int], *, whole: bool) -> int:
    """Deletes the records of versions from the store and asks all hosts to delete theirs. Returns the bytes in the
    store."""
    records = shared_records(home)
    if records is None or model not in records.models():
        return 0
    names = [
        Release(model=model, version=version, baseline=baseline).name
        for version in versions
        for baseline in (False, True)
    ]
    ask_to_forget(records, model, " or ".join(f"_release = '{name}'" for name in names))
    return delete_shared(records, model, versions, whole=whole)


def expired_shared_records(home: Path, store: Store, *, remove: bool) -> list[Garbage]:
    """What the watchers would delete as well from the store, and all records of models that it does not have."""
    records = shared_records(home)
    settings, known, found = capture_settings(store), set(store.models()), []
    for model in records.models() if records is not None else ():
        assert records is not None, "only shared records have models"
        listing = records.listing(model)
        if model in known:
            limits = capture_limits(settings, model, {file.version for file in listing})
            size = expire_shared(records, model, limits, time.time(), remove=remove)
        elif remove:
            size = delete_shared(records, model, [], whole=True)
        else:
            size = sum(file.size for file in listing)
        if size:
            found.append(Garbage(kind="shared records", name=model, bytes=size))
    return found


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
    sleep: Callable[[float], None] = time.sleep,
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
        sleep(_POLL_S)


def _hosts(records: SharedRecords, model: str) -> set[str]:
    """The hosts that may have records: those that have uploaded some, and those with an agent."""
    reports = (key.removeprefix(HOSTS) for key in records.files.keys(HOSTS))
    agents = {name.partition("/")[0] for name in reports if name.endswith("/agent.json")}
    return agents | set(records.files.names(f"{RECORDS}{model}/"))
