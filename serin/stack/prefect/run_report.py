"""Renders a run as one page of Markdown: its outcome, and the pages of its stages."""

from __future__ import annotations

import re
from typing import Any

from serin.errors import NotFound
from serin.stack.prefect.rest_api import Api, call

_PICTURE = re.compile(r"!\[[^\]]*\]\(data:image/[^)]*\)\n?")
_PIPELINES = ("pipeline",)
_HEADING = re.compile(r"^(#+) ", re.MULTILINE)
_MOST = 60_000  # characters: a comment on GitHub holds 65,536


def report(api: Api, run: str | None, *, pictures: bool = False) -> str:
    """Returns the report of the run with that name, or of the newest pipeline. Pictures are left out unless
    requested."""
    found = _find(api, run)
    whole = [found, *_children(api, found["id"])]
    parts = [_head(found), *(_section(page, pictures) for page in _pages(api, whole))]
    if found["state_type"] not in ("COMPLETED", "RUNNING", "SCHEDULED", "PENDING"):
        parts.insert(1, f"```\n{(found.get('state') or {}).get('message') or 'no word of why'}\n```\n")
    text = "\n".join(parts)
    return (
        text
        if len(text) <= _MOST or pictures
        else f"{text[:_MOST]}\n\n(truncated: `serin runs report` shows all of it)\n"
    )


def _find(api: Api, run: str | None) -> dict[str, Any]:
    wanted: dict[str, Any] = {"sort": "START_TIME_DESC", "limit": 1}
    if run is None:
        wanted["flows"] = {"name": {"any_": list(_PIPELINES)}}
        wanted["flow_runs"] = {"start_time": {"is_null_": False}}
    else:
        wanted["flow_runs"] = {"name": {"any_": [run]}}
    found: list[dict[str, Any]] = call(api, "POST", "/flow_runs/filter", wanted)
    if not found:
        raise NotFound(kind="run", name=run or "of a pipeline", known=[])
    return found[0]


def _children(api: Api, run: str) -> list[dict[str, Any]]:
    """Returns the placed stages of a run."""
    body = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "sort": "START_TIME_ASC", "limit": 50}
    found: list[dict[str, Any]] = call(api, "POST", "/flow_runs/filter", body)
    return found


def _pages(api: Api, runs: list[dict[str, Any]]) -> list[str]:
    """Returns the pages of the runs in the order they were made; of pages with the same name the last."""
    body = {"artifacts": {"flow_run_id": {"any_": [run["id"] for run in runs]}}, "limit": 100}
    found: list[dict[str, Any]] = call(api, "POST", "/artifacts/filter", body)
    newest = {page["key"]: page for page in sorted(found, key=lambda page: page["created"])}
    ordered = sorted(newest.values(), key=lambda page: page["created"])
    return [str(page["data"]) for page in ordered if page["type"] == "markdown"]


def _head(run: dict[str, Any]) -> str:
    seconds = run.get("total_run_time") or 0.0
    spec = run["parameters"].get("spec")
    name = spec.get("name") if isinstance(spec, dict) else spec
    return f"## {run['state_name']}: {name or run['name']}\n\nRun `{run['name']}`, {seconds:,.0f} s.\n"


def _section(page: str, pictures: bool) -> str:
    """Renders a page one heading level deeper, below the head of the report."""
    return _HEADING.sub(r"##\1 ", page if pictures else _PICTURE.sub("", page))
