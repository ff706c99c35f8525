"""Hosts as they report themselves, and a stage's host that falls silent."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serin.cli import app
from serin.cluster.host_list import SILENT_S, forget_host, read_hosts
from serin.cluster.host_worker import Reports, worker_command
from serin.commands.hosts import worker as worker_command_line
from serin.errors import NotFound, SpecError
from serin.formats.cluster.host_report import AgentReport, ReleaseReport, WorkerReport, agent_key, worker_key
from serin.pipeline import silence
from serin.pipeline.silence import RunHost
from serin.store.artifacts import Dataset
from serin.store.objects import FolderObjects
from serin.store.stage_results import find_result, keep_result, read_outcome, share_outcome


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> FolderObjects:
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("SERIN_HOST", "here")
    return FolderObjects(tmp_path / "store")


def worker(host: str, *, beat: int = 1, age_s: float = 0.0, runs: tuple[str, ...] = ()) -> WorkerReport:
    gpu = {"id": "0", "name": "H200", "memory_bytes": 10**9, "holders": [], "releases": []}
    return WorkerReport(
        host=host,
        pool="gpu",
        beat=beat,
        t=time.time() - age_s,
        cores=2,
        memory_bytes=1,
        gpus=(gpu,),
        runs=runs,
    )


def put(shared: FolderObjects, report: WorkerReport) -> None:
    shared.put(worker_key(report.host, report.pool), report.dump())


def test_every_host_is_listed_and_silent_ones_are_marked(shared: FolderObjects) -> None:
    put(shared, worker("b", runs=("r1",)))
    put(shared, worker("c", age_s=SILENT_S + 5))
    releases = {"flights-v1": ReleaseReport(state="ready")}
    agent = AgentReport(
        host="b", beat=1, t=time.time(), address="192.0.2.1:8080", peer=None, desired_seq=0, evidence_seq=0,
        releases=releases,
    )  # fmt: skip
    shared.put(agent_key("b"), agent.dump())
    shared.put("cluster/hosts/d/agent.json", b"{}")  # of another version
    found = {entry.host: entry for entry in read_hosts()}
    assert {host: entry.silent for host, entry in found.items()} == {"b": False, "c": True}
    assert "1 of 1 releases ready" in str(found["b"])
    assert "SILENT" in str(found["c"])
    listed = CliRunner().invoke(app, ["hosts", "list", "--json"])
    assert [entry["host"] for entry in json.loads(listed.stdout)] == ["b", "c"]
    gpus = json.loads(CliRunner().invoke(app, ["gpus", "--json"]).stdout)
    assert [(host["host"], host["silent"], len(host["gpus"])) for host in gpus["hosts"]] == [
        ("b", False, 1),
        ("c", True, 1),
    ]


def test_a_forgotten_host_leaves_neither_reports_nor_evidence(shared: FolderObjects) -> None:
    put(shared, worker("b"))
    put(shared, worker("c"))
    shared.put("cluster/evidence/b/000000000001.json", b"{}")
    forget_host("b")
    assert shared.keys("cluster/") == [worker_key("c", "gpu")]
    with pytest.raises(NotFound, match="'b'"):
        forget_host("b")


def test_a_worker_reports_and_leaves(shared: FolderObjects) -> None:
    reports = Reports("cpu")
    reports.report(["r1"])
    reports.report(["r2"])
    content = shared.read(worker_key("here", "cpu"))
    report = WorkerReport.load(content.content)
    assert (report.host, report.beat, report.runs) == ("here", 2, ("r2",))
    reports.leave()
    assert shared.keys("cluster/") == []


def test_without_a_shared_store_nothing_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path))
    monkeypatch.delenv("SERIN_STORE", raising=False)
    assert not Reports("cpu").wanted
    assert read_hosts() == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_given_up_when_its_hosts_report_does_not_change(
    shared: FolderObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(silence.time, "monotonic", lambda: clock[0])
    put(shared, worker("b", beat=1, runs=("run",)))
    put(shared, worker("c", beat=1, runs=("other",)))
    host = RunHost("run")
    assert host.silent() is None
    clock[0] += silence.SILENT_S - 1
    put(shared, worker("b", beat=2, runs=("run",)))
    assert host.silent() is None
    clock[0] += silence.SILENT_S - 1
    assert host.silent() is None
    clock[0] += 2
    assert host.silent() == "b"
    put(shared, worker("b", beat=3))
    assert host.silent() is None


def test_a_result_of_another_host_is_found_by_its_key(shared: FolderObjects, tmp_path: Path) -> None:
    dataset = Dataset(path="/elsewhere/datasets/ab", digest="ab", rows={"train": 3})
    keep_result(tmp_path / "home-of-b", "etl", "key", dataset)
    assert find_result(tmp_path / "home-of-a", "etl", "key", Dataset) == dataset
    assert find_result(tmp_path / "home-of-a", "etl", "other", Dataset) is None
    share_outcome("run", dataset, [{"stage": "etl", "ran": True, "why": "first"}])
    outcome = read_outcome("run")
    assert Dataset(**outcome.value) == dataset
    assert outcome.notes[0]["why"] == "first"
    assert read_outcome("unknown") is None


def test_a_worker_needs_a_server_and_a_store(shared: FolderObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    del shared
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4200/api")
    command, variables, _ = worker_command(Path.cwd(), "gpu", limit=1)
    assert command[command.index("--name") + 1] == "serin-gpu-here"
    assert command[-2:] == ["--limit", "1"]
    assert variables["PREFECT_API_URL"] == "http://prefect.example:4200/api"
    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.delenv("SERIN_STORE")
    with pytest.raises(SpecError, match=r"(?s)PREFECT_API_URL.*SERIN_STORE"):
        worker_command(Path.cwd(), "gpu", limit=None)


def test_a_worker_that_a_shell_starts_in_the_background_can_be_stopped(
    shared: FolderObjects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del shared
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example:4200/api")
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(os, "execve", lambda *_: seen.append(signal.getsignal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does without job control
    try:
        worker_command_line("cpu")
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_DFL]


def test_a_late_report_does_not_bring_back_a_worker_that_has_left(shared: FolderObjects) -> None:
    reports = Reports("cpu")
    reports.report([])
    assert [entry.host for entry in read_hosts()] == ["here"]
    reports.leave()
    reports.report([])
    assert read_hosts() == []
    assert shared.keys("") == []
