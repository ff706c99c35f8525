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
    flows: list[dict[str, Any]] = call(api_url, "POST", "/flows/filter", {"limit": 200})
    names = {flow["id"]: flow["name"] for flow in flows}
    return sorted(f"{names.get(entry['flow_id'], '?')}/{entry['name']}" for entry in found)


def online_workers(api_url: str, pool: str) -> int:
    try:
        found: list[dict[str, Any]] = call(
            api_url, "POST", f"/work_pools/{pool}/workers/filter", {"limit": 20}
        )
    except PrefectRefused:
        return 0
    return sum(worker.get("status") == "ONLINE" for worker in found)


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
