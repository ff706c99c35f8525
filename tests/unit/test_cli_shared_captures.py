"""`serin captures` where hosts share a store, and what deleting versions, `serin gc` and `serin hosts remove` do."""

import json
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from serin.errors import NotFound, SpecError, StoreUnreachable
from serin.formats.forget_requests import read_applied
from serin.machine.ports import free_ports
from serin.monitoring.capture.read import captured
from serin.spec.monitoring import CaptureSpec
from serin.store.bucket import Timing
from tests.fakes.sharing_hosts import MODEL, NOON, SharingHost
from tests.unit.test_cli_captures import published, serin


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SharingHost, SharingHost]:
    """The command is typed on the first; both have two rows in the store."""
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("SERIN_HOST", "a")
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    published(MODEL, 1)
    a, b = (SharingHost(tmp_path, str(tmp_path / "store"), name) for name in "ab")
    a.record(1, 2)
    b.record(2, 3, t=NOON + 60)
    for each in (b, a):
        assert each.share() == {}
    return a, b


def test_records_of_all_hosts_are_listed_shown_and_exported(
    hosts: tuple[SharingHost, SharingHost], tmp_path: Path
) -> None:
    head, *lines = serin("captures", "list").output.splitlines()
    assert head.split()[-1] == "host"
    assert [(line.split()[5], line.split()[-1]) for line in lines] == [("2", "a"), ("2", "b")]
    listed = json.loads(serin("captures", "list", MODEL, "--json").output)
    assert [(view["host"], view["versions"][0]["rows"]) for view in listed] == [("a", 2), ("b", 2)]
    shown = json.loads(serin("captures", "show", MODEL, "-n", "3", "--json").output)
    assert [row["_id"] for row in shown] == ["a2", "b2", "b3"]
    out = tmp_path / "rows.parquet"
    assert serin("captures", "export", MODEL, "--out", str(out)).output == f"4 rows in {out}\n"
    assert sorted(pq.read_table(out)["_id"].to_pylist()) == ["a1", "a2", "b2", "b3"]
    since = ("--since", "2026-03-01T12:01", "--until", "2026-03-02")
    assert serin("captures", "export", f"{MODEL}:1", "-o", str(tmp_path / "b.csv"), *since).output.startswith(
        "2 rows"
    )
    none = serin("captures", "export", MODEL, "-o", str(tmp_path / "no.csv"), "--until", "2026-03-01").output
    assert none == "no rows were recorded then; no file was written\n"
    with pytest.raises(NotFound, match="no recorded version of 'taxis': '7'"):
        serin("captures", "export", f"{MODEL}:7", "-o", str(out))


def test_forget_asks_all_hosts_and_shows_which_have_done_it(hosts: tuple[SharingHost, SharingHost]) -> None:
    a, b = hosts
    forget = ("captures", "forget", MODEL)
    assert serin(*forget).output == "nothing was asked to be deleted so far\n"
    with pytest.raises(SpecError, match="no column 'agee'"):
        serin(*forget, "--where", "agee = 1", "--yes")
    with pytest.raises(SpecError, match="is not a condition"):
        serin(*forget, "--where", "passenger_id + 1", "--yes")
    assert serin(*forget, "--where", "passenger_id = 2").exit_code == 2  # nobody could be asked
    asked = serin(*forget, "--where", "passenger_id = 2", "--wait", "0s", "--yes")
    assert asked.output.count("WAITING since") == 2
    for now in (NOON + 100, NOON + 103):
        b.share(now)
    (state,) = json.loads(serin(*forget, "--json").output)
    assert (state["waiting"], state["applied"]["b"]["rows"]) == (["a"], 1)
    for now in (NOON + 100, NOON + 103):
        a.share(now)
    lines = serin(*forget).output.splitlines()
    assert [line.split()[-3:] for line in lines[1:]] == [["1", "1", "0"]] * 2
    assert a.ids() == ["a1", "b3"]


def test_deleting_a_version_deletes_its_records_on_all_hosts(hosts: tuple[SharingHost, SharingHost]) -> None:
    a, b = hosts
    for each in hosts:
        each.send(4, version=2, release="taxis-v2")
    published(MODEL, 2)
    serin("models", "remove", f"{MODEL}:2", "--yes")
    assert a.ids() == ["a1", "a2", "b2", "b3"]
    for now in (NOON + 100, NOON + 103):
        b.share(now)
    assert captured(b.home, MODEL, versions=[2]).num_rows == 0
    assert b.ids() == ["a1", "a2", "b2", "b3"]


def test_gc_applies_the_limits_to_the_store(hosts: tuple[SharingHost, SharingHost], tmp_path: Path) -> None:
    published(MODEL, 3, capture="{keep: 2d}")
    a, b = hosts
    b.limits = CaptureSpec(share=1, keep=100000 * 86_400)
    b.record(9, t=time.time(), version=3)
    b.share()
    found = [(each["kind"], each["name"]) for each in json.loads(serin("gc", "--json").output)]
    assert ("shared records", MODEL) in found
    serin("gc", "--remove")
    assert a.ids() == ["b9"]


def test_a_host_that_only_has_records_can_be_forgotten(hosts: tuple[SharingHost, SharingHost]) -> None:
    a, _ = hosts
    serin("captures", "forget", MODEL, "--where", "passenger_id = 2", "--wait", "0s", "--yes")
    serin("hosts", "remove", "b", "--yes")
    for now in (NOON + 100, NOON + 103):
        a.share(now)
    assert a.ids() == ["a1", "b3"]
    assert read_applied(a.records.files, MODEL)[1]["b"].by == "a"
    with pytest.raises(NotFound, match="no host 'c'"):
        serin("hosts", "remove", "c", "--yes")


def test_without_the_store_the_records_of_this_host_are_shown_and_no_part_is_exported(
    hosts: tuple[SharingHost, SharingHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = Timing(connect_s=1, read_s=1, attempts=1, patience_s=0)
    monkeypatch.setattr("serin.store.bucket.PATIENT", quick)
    for name, value in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("SERIN_STORE", "s3://bucket/some")
    listed = serin("captures", "list", MODEL)
    assert "only the records of this host are read" in listed.stderr
    assert listed.stdout.splitlines()[1].split()[5] == "2"
    shown = serin("captures", "show", MODEL, "--json")
    assert [row["_id"] for row in json.loads(shown.stdout)] == ["a1", "a2"]
    out = tmp_path / "rows.parquet"
    with pytest.raises(StoreUnreachable):
        serin("captures", "export", MODEL, "--out", str(out))
    assert not out.exists()
