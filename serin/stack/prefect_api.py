"""The few calls to a Prefect server's REST interface that the stack needs. Importing Prefect would take seconds."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from serin.errors import PrefectGone, PrefectRefused

_UNFINISHED = ["RUNNING", "PENDING", "CANCELLING"]


def answers(api_url: str, *, seconds: float = 2.0) -> bool:
    """Whether a Prefect server is there: it may ask for credentials, but it must not be broken."""
    try:
        with urllib.request.urlopen(f"{api_url.rstrip('/')}/health", timeout=seconds):  # noqa: S310
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False


def call(api_url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """One JSON request. PrefectRefused with the server's own words when it says no."""
    request = urllib.request.Request(  # noqa: S310
        f"{api_url.rstrip('/')}/{path.lstrip('/')}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30.0) as response:  # noqa: S310
            content = response.read()
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:500]
        raise PrefectRefused(call=f"{method} {path}", code=error.code, reason=detail) from error
    except OSError as error:
        raise PrefectGone(url=api_url, reason=str(error)) from error
    return json.loads(content) if content else None


def ensure_pool(api_url: str, name: str, *, template: Mapping[str, Any] | None, slots: int | None) -> None:
    """A process work pool `name` with this job template and limit, made or brought up to date."""
    settings: dict[str, Any] = {"concurrency_limit": slots}
    if template is not None:
        settings["base_job_template"] = dict(template)
    try:
        call(api_url, "POST", "/work_pools/", {"name": name, "type": "process", **settings})
    except PrefectRefused as refusal:
        if refusal.fields["code"] != 409:
            raise
        call(api_url, "PATCH", f"/work_pools/{name}", settings)


def deployments(api_url: str) -> list[str]:
    """Every deployment as flow/name."""
    found: list[dict[str, Any]] = call(api_url, "POST", "/deployments/filter", {"limit": 200})
    names = flow_names(api_url)
    return sorted(f"{names.get(entry['flow_id'], '?')}/{entry['name']}" for entry in found)


def flow_names(api_url: str) -> dict[str, str]:
    """Flows by id."""
    flows: list[dict[str, Any]] = call(api_url, "POST", "/flows/filter", {"limit": 200})
    return {flow["id"]: flow["name"] for flow in flows}


def flow_runs(api_url: str, *, limit: int, name: str | None = None) -> list[dict[str, Any]]:
    """The newest runs first; those of one name when it is given."""
    body: dict[str, Any] = {"sort": "EXPECTED_START_TIME_DESC", "limit": limit}
    if name is not None:
        body["flow_runs"] = {"name": {"any_": [name]}}
    found: list[dict[str, Any]] = call(api_url, "POST", "/flow_runs/filter", body)
    return [run for run in found if run["state_type"] != "SCHEDULED" or run.get("auto_scheduled") is False]


def run_log(api_url: str, run_id: str, *, lines: int = 50) -> list[str]:
    """The last lines of a run's log, oldest first."""
    body = {"logs": {"flow_run_id": {"any_": [run_id]}}, "sort": "TIMESTAMP_DESC", "limit": lines}
    found: list[dict[str, Any]] = call(api_url, "POST", "/logs/filter", body)
    return [f"{entry['timestamp'][:19]} {entry['message']}" for entry in reversed(found)]


def close_lost_runs(api_url: str, pools: Iterable[str]) -> list[str]:
    """Mark as crashed every run of `pools` that is recorded as unfinished; returns their names.

    Only for a server that was just started by a stack whose processes have all ended: nobody can be running them, and
    Prefect itself would show them as running for ever.
    """
    unfinished: list[dict[str, Any]] = call(
        api_url,
        "POST",
        "/flow_runs/filter",
        {
            "flow_runs": {"state": {"type": {"any_": _UNFINISHED}}},
            "work_pools": {"name": {"any_": list(pools)}},
            "limit": 200,
        },
    )
    for run in unfinished:
        state = {
            "type": "CRASHED",
            "name": "Crashed",
            "message": "the stack ended while this run was under way",
        }
        call(api_url, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    return [str(run["name"]) for run in unfinished]
