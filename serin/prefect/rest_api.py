"""The few calls to a Prefect server's REST API that the stack needs. Importing Prefect would take seconds."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from serin.errors import PrefectGone, PrefectLoginRefused, PrefectRefused

_UNFINISHED = ["RUNNING", "PENDING", "CANCELLING"]
_SOON = timedelta(minutes=1)  # clocks differ
_UNAUTHORIZED, _FORBIDDEN = 401, 403
PAGE = 200  # the most entries that the server gives at once
_BUSY = 503  # two writes met in its database; the next try may succeed milliseconds later
_BUSY_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 4.0, 4.0)
_NO_TOKEN_WANTED = (404, 422)  # an older server; one without CSRF protection
_HERE = "serin"  # the type of worker whose runs are processes of its machine
_CLIENT = str(uuid.uuid4())  # this process, for the CSRF token of every change


@dataclass(frozen=True, slots=True)
class Api:
    """A server with its login. A plain URL stands for a server without one."""

    url: str
    login: str | None = field(default=None, repr=False)  # user:password
    key: str | None = field(
        default=None, repr=False
    )  # of Prefect Cloud; a login takes precedence, as in Prefect's client

    def headers(self) -> dict[str, str]:
        plain = {"Content-Type": "application/json"}
        if self.login is not None:
            return {**plain, "Authorization": f"Basic {base64.b64encode(self.login.encode()).decode()}"}
        return plain if self.key is None else {**plain, "Authorization": f"Bearer {self.key}"}


_TOKENS: dict[Api, dict[str, str]] = {}
_LOCK = threading.Lock()


def answers(api: Api | str, *, seconds: float = 2.0) -> bool:
    """Returns whether a Prefect server answers: it may require credentials, but it must not be broken."""
    try:
        with urllib.request.urlopen(f"{_api(api).url.rstrip('/')}/health", timeout=seconds):  # noqa: S310
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False


def call(api: Api | str, method: str, path: str, body: Mapping[str, Any] | list[Any] | None = None) -> Any:
    """Makes one JSON request. Raises PrefectRefused with the server's message when it is rejected."""
    server = _api(api)
    if method == "GET":
        return _patiently(server, method, path, {})
    token = _against_forgery(server)
    try:
        return _patiently(server, method, path, token, body)
    except PrefectRefused as refusal:
        if refusal.fields["code"] != _FORBIDDEN:
            raise
    return _patiently(server, method, path, _against_forgery(server, worn=token), body)


def query(api: Api | str, kind: str, **body: Any) -> list[dict[str, Any]]:
    """Returns the server's records of this kind (flow_runs, deployments, ...) that match the filter."""
    found: list[dict[str, Any]] = call(api, "POST", f"/{kind}/filter", body)
    return found


def query_all(api: Api | str, kind: str, *, most: int | None = None, **body: Any) -> list[dict[str, Any]]:
    """Returns the same page by page: at most so many, all by default."""
    found: list[dict[str, Any]] = []
    while most is None or len(found) < most:
        limit = PAGE if most is None else min(most - len(found), PAGE)
        page = query(api, kind, **body, limit=limit, offset=len(found))
        found += page
        if len(page) < limit:
            break
    return found


def _patiently(
    server: Api,
    method: str,
    path: str,
    token: dict[str, str],
    body: Mapping[str, Any] | list[Any] | None = None,
) -> Any:
    """Repeats the request while the server's database is locked."""
    for pause_s in _BUSY_PAUSES_S:
        try:
            return _request(server, method, path, server.headers() | token, body)
        except PrefectRefused as refusal:
            if refusal.fields["code"] != _BUSY:
                raise
            time.sleep(pause_s)
    return _request(server, method, path, server.headers() | token, body)


def _against_forgery(server: Api, *, worn: dict[str, str] | None = None) -> dict[str, str]:
    """Returns the CSRF header that a server requires with every change; `worn` is an expired one."""
    with _LOCK:  # a second token of the same client would invalidate the first
        found = _TOKENS.get(server)
        if found is None or found is worn:
            found = _TOKENS[server] = _new_token(server)
        return found


def _new_token(server: Api) -> dict[str, str]:
    try:
        answer = _patiently(server, "GET", f"/csrf-token?client={_CLIENT}", {})
    except PrefectRefused as refusal:
        if refusal.fields["code"] not in _NO_TOKEN_WANTED:
            raise
        return {}
    return {"Prefect-Csrf-Token": answer["token"], "Prefect-Csrf-Client": _CLIENT}


def _request(
    server: Api,
    method: str,
    path: str,
    headers: dict[str, str],
    body: Mapping[str, Any] | list[Any] | None = None,
) -> Any:
    request = urllib.request.Request(  # noqa: S310
        f"{server.url.rstrip('/')}/{path.lstrip('/')}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers=headers,
    )
    try:
        with urllib.request.urlopen(request, timeout=30.0) as response:  # noqa: S310
            content = response.read()
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:500]
        if error.code == _UNAUTHORIZED:
            reason = "it is wrong" if "Authorization" in headers else "there is none"
            raise PrefectLoginRefused(
                url=server.url, call=f"{method} {path}", code=error.code, reason=reason
            ) from None
        raise PrefectRefused(call=f"{method} {path}", code=error.code, reason=detail) from error
    except OSError as error:
        raise PrefectGone(url=server.url, reason=str(error)) from error
    return json.loads(content) if content else None


def _api(api: Api | str) -> Api:
    return Api(api) if isinstance(api, str) else api


def ensure_pool(
    api: Api | str, name: str, *, kind: str, template: Mapping[str, Any], slots: int | None
) -> None:
    """Creates or updates a work pool `name` of this type, with this job template and limit."""
    settings: dict[str, Any] = {"concurrency_limit": slots, "base_job_template": dict(template)}
    try:
        call(api, "POST", "/work_pools/", {"name": name, "type": kind, **settings})
    except PrefectRefused as refusal:
        if refusal.fields["code"] != 409:
            raise
        if call(api, "GET", f"/work_pools/{name}")["type"] == kind:
            call(api, "PATCH", f"/work_pools/{name}", settings)
        else:  # the type of a pool cannot be changed
            call(api, "DELETE", f"/work_pools/{name}")
            call(api, "POST", "/work_pools/", {"name": name, "type": kind, **settings})


def deployments(api: Api | str) -> list[str]:
    """Returns every deployment as flow/name."""
    names = flow_names(api)
    found = query(api, "deployments", limit=PAGE)
    return sorted(f"{names.get(entry['flow_id'], '?')}/{entry['name']}" for entry in found)


def next_run(api: Api | str, deployment: str) -> str | None:
    """Returns when a deployment runs next, as far as the server has planned; None: nothing is planned."""
    wanted = {
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "expected_start_time": {"after_": datetime.now(UTC).isoformat()},
    }
    of_it = {"id": {"any_": [deployment]}}
    order = "EXPECTED_START_TIME_ASC"
    found = query(api, "flow_runs", deployments=of_it, flow_runs=wanted, sort=order, limit=1)
    return found[0]["expected_start_time"] if found else None


def flow_names(api: Api | str) -> dict[str, str]:
    """Returns flow names by id."""
    return {flow["id"]: flow["name"] for flow in query(api, "flows", limit=PAGE)}


def flow_runs(
    api: Api | str, *, limit: int, name: str | None = None, pools: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Returns runs, newest first, of one name or of some work pools if given. Runs scheduled for later are left out."""
    soon = (datetime.now(UTC) + _SOON).isoformat()
    wanted: dict[str, Any] = {"expected_start_time": {"before_": soon}}
    if name is not None:
        wanted["name"] = {"any_": [name]}
    body: dict[str, Any] = {"sort": "EXPECTED_START_TIME_DESC", "limit": limit, "flow_runs": wanted}
    if names := list(pools):
        body["work_pools"] = {"name": {"any_": names}}
    found = query(api, "flow_runs", **body)
    return [run for run in found if run["state_type"] != "SCHEDULED" or run.get("auto_scheduled") is False]


def run_log(api: Api | str, run_id: str, *, lines: int = 50) -> list[str]:
    """The last lines of a run's log, oldest first."""
    of_run = {"flow_run_id": {"any_": [run_id]}}
    found = query_all(api, "logs", most=lines, logs=of_run, sort="TIMESTAMP_DESC")
    return [f"{entry['timestamp'][:19]} {entry['message']}" for entry in reversed(found)]


def online_workers(api: Api | str, pool: str) -> int:
    """Returns how many workers of a pool have reported themselves lately; 0 without such a pool."""
    if read_pool(api, pool) is None:
        return 0
    found = query(api, f"work_pools/{pool}/workers", limit=PAGE)
    return sum(worker["status"] == "ONLINE" for worker in found)


def is_elsewhere(run: Mapping[str, Any]) -> bool:
    """Returns whether a run was taken by a worker that starts it on other machines: as a job of a cluster."""
    kind = (run.get("labels") or {}).get("prefect.worker.type", _HERE)
    return kind not in (_HERE, "process")


def read_pool(api: Api | str, name: str) -> dict[str, Any] | None:
    """Returns a work pool; None when there is none of that name."""
    try:
        found: dict[str, Any] = call(api, "GET", f"/work_pools/{name}")
    except PrefectRefused as refusal:
        if refusal.fields["code"] != 404:
            raise
        return None
    return found


def pool_type(api: Api | str, name: str) -> str | None:
    """Returns the type of a work pool; None when there is none of that name."""
    found = read_pool(api, name)
    return None if found is None else str(found["type"])


def close_lost_runs(api: Api | str, pools: Iterable[str]) -> list[str]:
    """Marks every unfinished run of `pools` on this machine as crashed; returns their names.

    Only for a server that was just started by a stack whose processes have all ended: nothing can be running them, and
    Prefect itself would show them as running forever.
    """
    wanted = {"state": {"type": {"any_": _UNFINISHED}}}
    of_pools = {"name": {"any_": list(pools)}}
    unfinished = query(api, "flow_runs", flow_runs=wanted, work_pools=of_pools, limit=PAGE)
    lost = [run for run in unfinished if not is_elsewhere(run)]
    state = {"type": "CRASHED", "name": "Crashed", "message": "the stack ended while this run was active"}
    for run in lost:
        call(api, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    return [str(run["name"]) for run in lost]
