import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from serin.commands.stack import status
from serin.errors import StoreUnreachable
from serin.host.supervisor import Child
from serin.machine.process import ProcessState
from serin.monitoring.alerts.alert import AlertRecord
from serin.monitoring.latency import ReleaseLatency
from serin.monitoring.objectives.read import ObjectivesView, ObjectiveView
from serin.rollout.run.status import ModelStatus, ReleaseStatus, RolloutStatus
from serin.stack.status import Address, Status
from tests.kit.stacks import stack_in
from tests.unit.monitoring.test_alert_book import ALERT

ROLLOUT = RolloutStatus(
    id="r1",
    version=2,
    phase="shifting",
    running=True,
    step=0,
    steps=(5.0, 100.0),
    weight_percent=5.0,
    hold="no_traffic",
    verdict=None,
    reason="no request reached the candidate",
    by="controller",
    began=0.0,
    since=0.0,
    decided=0.0,
)
MODEL = ModelStatus(
    name="flights",
    live=1,
    previous=None,
    releases=(
        ReleaseStatus(version=1, arm="stable", weight_percent=95.0),
        ReleaseStatus(version=2, arm="candidate", weight_percent=5.0),
    ),
    rollout=ROLLOUT,
)
SEEN = ReleaseLatency(
    model="flights",
    release="flights-v1",
    arm="stable",
    requests=120,
    requests_per_s=2.0,
    p50_ms=1.5,
    p95_ms=3.0,
    p99_ms=None,
    error_share=0.0,
)


def child(name: str, state: ProcessState = "running") -> Child:
    return Child(name=name, state=state, pid=7, detail="")


WELL = Status(
    home=Path("/stack"),
    up=True,
    gateway=Address(url="http://127.0.0.1:8080", ready=True),
    prefect=Address(url="http://127.0.0.1:4200", ready=True),
    processes=(child("gateway"), child("controller"), child("flights-v1")),
    models=(MODEL,),
    ready=frozenset({"flights-v1", "flights-v2"}),
    latency=(SEEN,),
)


def test_a_stack_with_everything_ready_is_well() -> None:
    assert WELL.well
    assert replace(WELL, processes=(*WELL.processes, child("watcher", "starting"))).well, "right after `up`"


@pytest.mark.parametrize(
    "ill",
    [
        replace(WELL, up=False),
        replace(WELL, gateway=Address(url="", ready=False)),
        replace(WELL, prefect=Address(url="", ready=False)),
        replace(WELL, processes=(child("gateway"), child("controller", "failed"))),
        replace(WELL, processes=(child("gateway"), child("watcher", "failed"))),
        replace(WELL, supervisor_problem="FROZEN: process 7 was stopped by a signal"),
        replace(WELL, processes=(replace(child("gateway"), problem="FROZEN", frozen=True),)),
        replace(WELL, ready=frozenset({"flights-v1"})),  # the candidate has traffic and does not answer
    ],
)
def test_a_stack_with_a_part_that_fails_its_clients_is_not_well(ill: Status) -> None:
    assert not ill.well


def test_people_read_what_is_frozen_and_what_was_replaced() -> None:
    replaced = replace(child("controller"), problem="replaced 9 s ago: it was stopped by a signal")
    text = "\n".join(replace(WELL, supervisor_problem="FROZEN: process 7", processes=(replaced,)).lines())
    assert "supervisor FROZEN: process 7" in text
    assert "controller               running   process 7       replaced 9 s ago: it was stopped" in text
    assert replace(WELL, processes=(replaced,)).well


def test_a_release_without_traffic_need_not_be_ready() -> None:
    loading = replace(MODEL, releases=(MODEL.releases[0], replace(MODEL.releases[1], weight_percent=0.0)))
    assert replace(WELL, models=(loading,), ready=frozenset({"flights-v1"})).well


def test_serving_alone_is_well_without_a_prefect_and_says_nothing_of_one() -> None:
    alone = replace(WELL, prefect=None)
    assert alone.well
    assert "Prefect" not in "\n".join(alone.lines())
    assert alone.to_json()["prefect"] is None


def test_a_server_that_somebody_else_runs_is_shown_with_its_address() -> None:
    found = replace(WELL, elsewhere={"flights-v2": "10.0.0.2:8000"})
    (line,) = [line for line in found.lines() if "flights-v2" in line]
    assert line.endswith("ready  10.0.0.2:8000")
    (model,) = found.to_json()["models"]
    assert [release["elsewhere"] for release in model["releases"]] == [None, "10.0.0.2:8000"]


def test_the_json_is_what_programs_were_promised() -> None:
    found = WELL.to_json()
    assert set(found) == {
        "home",
        "up",
        "well",
        "supervisor",
        "gateway",
        "prefect",
        "console",
        "metrics",
        "problems",
        "processes",
        "models",
        "alerts",
    }
    assert found["processes"][0] == {"name": "gateway", "state": "running", "pid": 7, "problem": None}
    (model,) = found["models"]
    assert set(model) == {"name", "releases", "rollout", "objectives"}
    assert model["releases"][1] == {
        "version": 2,
        "edition": 1,
        "arm": "candidate",
        "weight": 5.0,
        "ready": True,
        "elsewhere": None,
        "latency": [],
    }
    assert model["releases"][0]["latency"][0]["p50_ms"] == 1.5


def test_people_read_who_is_live_how_fast_it_is_and_why_a_rollout_waits() -> None:
    text = "\n".join(WELL.lines())
    assert "flights: version 1 is live" in text
    assert "as stable: 2.0 requests/s, p50 1.50 ms, p95 3.00 ms, p99 -, 0.00% failed" in text
    assert "rolling out version 2: shifting, held: no_traffic (no request reached the candidate)" in text


def test_budgets_and_open_alerts_are_shown_and_do_not_make_a_stack_ill() -> None:
    spent = ObjectiveView(
        name="availability",
        target=0.999,
        limit_ms=None,
        requests=1_000,
        bad=2,
        budget_left=-1.0,
        windows=(),
        fires=True,
    )
    view = ObjectivesView(
        model="flights",
        release="flights-v1",
        objectives=(spent, replace(spent, name="latency", budget_left=0.4, fires=False)),
        rollbacks=(),
    )
    alert = replace(ALERT, severity="page", title="flights: too many requests fail")
    record = AlertRecord(
        id="a-1", alert=alert, fired=0.0, seen=0.0, acknowledged=1.0, acknowledged_by="ada", note=""
    )
    found = replace(WELL, objectives={"flights": view}, alerts=(record,))
    assert found.well
    lines = list(found.lines())
    assert "  error budget of 30 days: availability used up, burns too fast, latency 40% left" in lines
    words = "ALERT page flights/objective/availability: flights: too many requests fail (acknowledged by ada)"
    assert lines[-1] == words
    shown = found.to_json()
    assert shown["models"][0]["objectives"][0]["budget_left"] == -1.0
    assert shown["alerts"][0]["alert"]["key"] == alert.key


@pytest.fixture
def hanging_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("SERIN_STORE", "s3://models/serin")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, os.devnull)
        yield


@pytest.mark.parametrize("stack_is_here", [True, False])
@pytest.mark.usefixtures("hanging_store")
def test_it_answers_while_the_store_hangs(
    stack_is_here: bool, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serin.commands.stack._STORE_S", 0.05)
    if stack_is_here:
        stack_in(home)
    ended: list[Exception] = []

    def ask() -> None:
        try:
            status()
        except (typer.Exit, StoreUnreachable) as error:
            ended.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)
    assert ended, "it waits for the store"
    away = "the store s3://models/serin cannot be used: it does not answer within 0.05 s"
    shown = capsys.readouterr()
    if stack_is_here:
        assert shown.err == f"hosts are not shown: {away}\n"
        assert f"supervisor SILENT: process {os.getpid()} does not answer" in shown.out
    else:
        assert str(ended[0]) == away
