"""Several hosts, with releases of their own or of Kubernetes, serve online windows only where they share events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serin.cluster.combined_fleet import CombinedFleet, check_same_windows
from serin.cluster.version_settings import check_windows, stored_schema, stored_windows
from serin.cluster.windows_step import open_state
from serin.errors import RolloutRefused, StateUnavailable
from serin.formats.cluster.host_report import AgentReport
from serin.formats.windows import WindowPlan
from serin.host import windows as host_windows
from serin.host.state import Stack, write_stack
from serin.host.windows import apply_plans, forget_keys, keeps_events, served_plan, state_folder
from serin.serving.external import External
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.fakes.rollout import FakeFleet
from tests.unit.serving import bundles
from tests.unit.windows.test_step import plan, two_keys

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


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(
    ("live", "new"),
    [(plan(), plan(span_s=3600)), (plan(), None), (None, plan())],
    ids=["span", "without", "with"],
)
def test_other_windows_than_those_of_the_live_version_are_refused_also_for_a_single_step(
    tmp_path: Path, live: WindowPlan | None, new: WindowPlan | None, share: bool
) -> None:
    store = Store(str(tmp_path / "store"))
    stable, candidate = (
        bundles.publish(store, bias=0.0, extra={} if each is None else {"windows.json": each.dump()}).release
        for each in (live, new)
    )
    fleet = CombinedFleet(FakeFleet(), External(store), stored_schema(store), stored_windows(store))
    with pytest.raises(RolloutRefused, match=f"are not those of {stable.name}; backfill"):
        fleet.check_fits(candidate, stable, share=share)
    fleet.check_fits(stable, stable, share=share)


def test_what_changes_no_number_may_change_with_a_version() -> None:
    live = two_keys()
    found = {
        1: live,
        2: replace(live, unavailable="nulls", inputs=live.inputs[::-1], windows=live.windows[::-1]),
    }
    first, second = (Release(model="pay", version=version) for version in found)
    check_same_windows(second, first, lambda release: found[release.version])


def test_a_host_that_joins_without_the_setting_counts_no_events_of_its_own(tmp_path: Path) -> None:
    write_stack(Stack(home=tmp_path, gateway_port=1, prefect_api_url="", agent=True))
    with pytest.raises(StateUnavailable, match="set SERIN_EVENTS"):
        open_state(tmp_path)


def test_older_versions_of_serin_can_read_the_report_of_a_host_without_the_setting() -> None:
    assert "events" not in report("a", None).to_json()
    assert AgentReport.load(report("a", SHARED).dump()).events == SHARED


def test_the_plan_of_a_model_goes_with_it_and_the_process_runs_while_events_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(host_windows, "_start", started.append)
    apply_plans(tmp_path, {"pay": plan().to_json(), "other": plan().to_json()})
    apply_plans(tmp_path, {"other": plan().to_json()})
    assert (served_plan(tmp_path, "pay"), served_plan(tmp_path, "other")) == (None, plan())
    assert len(started) == 2
    apply_plans(tmp_path, {})
    assert (len(started), keeps_events(tmp_path)) == (2, False)
    state_folder(tmp_path).mkdir(parents=True)
    apply_plans(tmp_path, {})
    assert (len(started), keeps_events(tmp_path)) == (3, True)


def test_forgetting_a_key_removes_folders_that_were_moved_aside_as_well(tmp_path: Path) -> None:
    aside = state_folder(tmp_path).with_name("state-before-17")
    aside.mkdir(parents=True)
    (aside / "data.mdb").write_bytes(b"events")
    with pytest.raises(StateUnavailable):  # nothing answers here
        forget_keys(tmp_path, "pay", plan(), {"card": ["c1"]})
    assert not aside.exists()
