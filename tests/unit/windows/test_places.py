"""Several hosts, with releases of their own or of Kubernetes, serve online windows only where they share events."""

from __future__ import annotations

from pathlib import Path

import pytest

from serin.cluster.version_settings import check_windows
from serin.cluster.windows_step import open_state
from serin.errors import RolloutRefused, StateUnavailable
from serin.formats.cluster.host_report import AgentReport
from serin.host.state import Stack, write_stack
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.unit.serving import bundles
from tests.unit.windows.test_step import plan

SHARED = "valkeys://valkey.internal:6380/0"


def report(host: str, events: str | None) -> AgentReport:
    return AgentReport(
        host=host,
        beat=1,
        t=0.0,
        address=f"{host}:8080",
        peer=None,
        desired_seq=0,
        evidence_seq=0,
        events=events,
    )


def check(tmp_path: Path, events: dict[str, str | None], *, windows: bool = True) -> None:
    store = Store(str(tmp_path / "store"))
    extra = {"windows.json": plan().dump()} if windows else {}
    bundle = bundles.publish(store, bias=0.0, extra=extra)
    reports = {host: report(host, place) for host, place in events.items()}
    check_windows(store, lambda: reports)(Release(model=bundle.model, version=bundle.version))


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ({"a": SHARED, "b": None, "c": None}, "b, c share no events with other hosts; set SERIN_EVENTS"),
        ({"a": SHARED, "b": "valkeys://other:6380/0"}, "hosts keep events in different places"),
        ({"a": "valkey://127.0.0.1:6379/0", "b": "valkey://127.0.0.1:6379/0"}, "loopback interface"),
    ],
)
def test_a_version_is_refused_by_name_where_hosts_do_not_share_events(
    tmp_path: Path, events: dict[str, str | None], problem: str
) -> None:
    with pytest.raises(RolloutRefused, match=problem):
        check(tmp_path, events)


def test_a_version_is_rolled_out_where_they_do_and_one_without_windows_anywhere(tmp_path: Path) -> None:
    check(tmp_path, {"a": SHARED, "b": SHARED})
    check(tmp_path, {"a": SHARED, "b": None}, windows=False)


def test_a_host_that_joins_without_the_setting_counts_no_events_of_its_own(tmp_path: Path) -> None:
    write_stack(Stack(home=tmp_path, gateway_port=1, prefect_api_url="", agent=True))
    with pytest.raises(StateUnavailable, match="set SERIN_EVENTS"):
        open_state(tmp_path)


def test_older_versions_of_serin_can_read_the_report_of_a_host_without_the_setting() -> None:
    assert "events" not in report("a", None).to_json()
    assert AgentReport.load(report("a", SHARED).dump()).events == SHARED
