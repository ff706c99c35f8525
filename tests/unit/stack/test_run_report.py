"""A run as Markdown, from what a server that speaks like Prefect's says."""

from __future__ import annotations

from typing import Any

import pytest

from serin.errors import NotFound
from serin.stack.prefect import run_report
from serin.stack.prefect.rest_api import Api

API = Api("http://127.0.0.1:9/api")
RUN = {
    "id": "r1", "name": "famous-bonobo", "state_type": "COMPLETED", "state_name": "Completed", "state": None,
    "total_run_time": 117.4, "parameters": {"spec": {"name": "late-parcels"}},
}  # fmt: skip
PICTURE = "![c](data:image/png;base64,AA==)"
PAGES = [
    {"key": "late-parcels-training", "type": "markdown", "created": "2", "data": f"# Training\n\n{PICTURE}\n"},
    {"key": "late-parcels-data", "type": "markdown", "created": "1", "data": "# Dataset\n\n## Cost\n"},
    {"key": "late-parcels-training", "type": "markdown", "created": "0", "data": "# Training, the attempt before\n"},
]  # fmt: skip


class FakeServer:
    """Answers the three questions of a report."""

    def __init__(self, runs: list[dict[str, Any]], pages: list[dict[str, Any]]) -> None:
        self.runs, self.pages = runs, pages
        self.asked: list[dict[str, Any]] = []

    def __call__(self, _api: Api, _method: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append(body)
        if path == "/artifacts/filter":
            return self.pages
        return [] if "parent_flow_run_id" in body["flow_runs"] else self.runs


def tell(monkeypatch: pytest.MonkeyPatch, server: FakeServer, run: str | None = None, **how: bool) -> str:
    monkeypatch.setattr(run_report, "call", server)
    return run_report.report(API, run, **how)


def test_a_run_is_reported_with_the_last_page_of_each_stage_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    told = tell(monkeypatch, FakeServer([RUN], PAGES), "famous-bonobo")
    assert told.startswith("## Completed: late-parcels\n\nRun `famous-bonobo`, 117 s.\n")
    assert told.index("### Dataset\n\n#### Cost") < told.index("### Training")
    assert "attempt before" not in told
    assert "data:image" not in told


def test_pictures_stay_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "![c](data:image/png" in tell(monkeypatch, FakeServer([RUN], PAGES), pictures=True)


def test_a_failed_run_is_reported_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {
        **RUN,
        "state_type": "FAILED",
        "state_name": "Failed",
        "state": {"message": "GateFailed: auc 0.5"},
    }
    told = tell(monkeypatch, FakeServer([failed], []))
    assert told.startswith("## Failed: late-parcels")
    assert "GateFailed: auc 0.5" in told


def test_a_report_fits_into_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    long = [{**PAGES[0], "data": "x" * 100_000}]
    told = tell(monkeypatch, FakeServer([RUN], long))
    assert len(told) < 65_536
    assert "truncated" in told


def test_a_run_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="no run 'nothing'"):
        tell(monkeypatch, FakeServer([], []), "nothing")
