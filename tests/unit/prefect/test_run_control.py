"""Runs of a server that answers from a list: cancelled, reported as Markdown, and summed up."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serin.errors import NotFound, RunNotCancellable
from serin.host.process_scan import RunProcesses
from serin.prefect import rest_api, run_control
from serin.prefect.rest_api import Api
from serin.prefect.run_control import cancel_run
from serin.prefect.run_summary import summary
from serin.store.artifacts import Release
from serin.store.store import Store


@dataclass
class Server:
    """A run whose states are seen one after the other; the last one stays."""

    states: list[str]
    asked: list[str] = field(default_factory=list)  # the states that were requested

    def call(self, _: Any, method: str, path: str, body: Mapping[str, Any]) -> Any:
        if path.endswith("/set_state"):
            self.asked.append(body["state"]["type"])
            return None
        assert (method, path) == ("POST", "/flow_runs/filter")
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return [{"id": "7", "name": "brave-owl", "state_type": state, "state_name": state.title()}]


@dataclass
class Clock:
    """Every look at a run takes half a second of it."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Up:
    home: Path
    is_alive: bool = True
    api: None = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    found = Clock()
    monkeypatch.setattr(run_control, "time", found)
    monkeypatch.setattr(run_control, "needed_server", lambda _: Up(tmp_path))
    monkeypatch.setattr(run_control, "run_processes", lambda _: {})
    return found


def _serve(monkeypatch: pytest.MonkeyPatch, *states: str) -> Server:
    server = Server([*states])
    for module in (run_control, rest_api):
        monkeypatch.setattr(module, "call", server.call)
    return server


def test_a_run_that_reports_a_crash_before_its_worker_says_cancelled_is_cancelled(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = _serve(monkeypatch, "RUNNING", "CANCELLING", "CRASHED", "CRASHED", "CRASHED", "CANCELLED")
    assert cancel_run(tmp_path, "brave-owl") == "brave-owl"
    assert server.asked == ["CANCELLING"]
    assert clock.now == 2.0


def test_a_run_that_stays_crashed_is_reported_as_that_before_the_time_for_cancelling_is_over(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _serve(monkeypatch, "RUNNING", "CANCELLING", "CRASHED")
    with pytest.raises(RunNotCancellable, match="crashed"):
        cancel_run(tmp_path, "brave-owl")
    assert run_control._SETTLE_S <= clock.now < run_control._CANCEL_S / 2


def test_a_run_whose_processes_are_left_is_waited_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _serve(monkeypatch, "RUNNING", "CANCELLED")
    left = {"7": RunProcesses(engines=(1,), others=())}
    monkeypatch.setattr(run_control, "run_processes", lambda _: left if clock.now < 5.0 else {})
    cancel_run(tmp_path, "brave-owl")
    assert clock.now == 5.0


def test_a_run_that_has_ended_cannot_be_cancelled(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = _serve(monkeypatch, "COMPLETED")
    with pytest.raises(RunNotCancellable, match="completed"):
        cancel_run(tmp_path, "brave-owl")
    assert server.asked == []
    assert clock.now == 0.0


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


def tell(monkeypatch: pytest.MonkeyPatch, server: FakeServer, run: str | None = None) -> str:
    for module in (run_control, rest_api):
        monkeypatch.setattr(module, "call", server)
    return run_control.report(API, run)["report.md"]


def test_a_run_is_reported_with_the_last_page_of_each_stage_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    told = tell(monkeypatch, FakeServer([RUN], PAGES), "famous-bonobo")
    assert told.startswith("## Completed: late-parcels\n\nRun `famous-bonobo`, 117 s.\n")
    assert told.index("### Dataset\n\n#### Cost") < told.index("### Training")
    assert "attempt before" not in told
    assert "data:image" not in told


def test_the_version_comes_first_and_its_card_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [("version", "3", "# late-parcels version 2\n"), ("card", "4", "# late-parcels, version 2\n")]
    pages = [
        {"key": f"late-parcels-{key}", "type": "markdown", "created": created, "data": data}
        for key, created, data in made
    ]
    monkeypatch.setattr(rest_api, "call", FakeServer([RUN], [*PAGES, *pages]))
    files = run_control.report(API, "famous-bonobo")
    assert files["card.md"] == "# late-parcels, version 2\n"
    told = files["report.md"]
    assert told.index("### late-parcels version 2") < told.index("### Dataset") < told.index("### Training")
    assert "late-parcels, version 2" not in told


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


GATE = {"test_onnx": {"logloss": 0.25, "auc": 0.91}, "test_rows": 12345}
COMPARED = {
    "live_version": 1,
    "overall": {"rows": 500},
    "reason": "auc 0.9100 against 0.9000, better by 0.0100",
    "approved_by": None,
}


def publish(**files: dict[str, Any]) -> Release:
    store = Store.open()
    with store.workspace() as folder:
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        (folder / "manifest.json").write_text("{}")
        bundle = store.publish_bundle("flights", store.reserve_version("flights"), folder)
    return Release(model="flights", version=bundle.version)


def test_a_first_version_has_nothing_to_be_compared_with(home: Path) -> None:
    release = publish(gate=GATE, champion={"live_version": None, "reason": "there is no live model"})
    assert summary(home, release, served=True) == [
        "flights version 1 is live",
        "auc 0.9100, logloss 0.2500 on 12,345 test rows",
        "there was no live version to compare it with",
        "try it: serin predict flights ROWS.csv (its columns: serin models show flights)",
        "next: serin status, serin rollout report flights",
    ]


@pytest.mark.parametrize(
    ("champion", "line"),
    [
        (COMPARED, "compared with version 1: auc 0.9100 against 0.9000, better by 0.0100"),
        (
            COMPARED | {"overall": None, "reason": "the target changed"},
            "not compared with version 1: the target changed",
        ),
        (
            COMPARED | {"reason": "overall auc 0.5000 against 0.9000", "approved_by": "Ada"},
            "compared with version 1: overall auc 0.5000 against 0.9000; approved by Ada",
        ),
    ],
)
def test_a_version_that_is_not_served_names_the_command_that_serves_it(
    champion: dict[str, Any], line: str, home: Path
) -> None:
    assert summary(home, publish(gate=GATE, champion=champion), served=False) == [
        "flights version 1 is published, not served",
        "auc 0.9100, logloss 0.2500 on 12,345 test rows",
        line,
        "next: serin rollout start flights:1",
    ]


def test_a_version_without_metrics_says_none(home: Path) -> None:
    assert summary(home, publish(gate={"test_onnx": {}, "test_rows": 0}), served=False) == [
        "flights version 1 is published, not served",
        "next: serin rollout start flights:1",
    ]
