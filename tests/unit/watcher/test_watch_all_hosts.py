"""Drift and live quality where several hosts serve: each host counts the records of all of them, every row once."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from serin import metrics
from serin.formats.cluster.desired_state import DesiredState
from serin.formats.forget_requests import write_request
from serin.formats.shared_captures import combined_home, records_home
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.monitoring.capture import all_hosts
from serin.monitoring.capture.read import parts
from serin.store.artifacts import ModelRoute, Release
from serin.store.store import Store
from serin.watcher.drift_duty import DriftDuty
from serin.watcher.served import served_models
from serin.watcher.share_duty import ShareDuty
from tests.fakes.live_quality import BEGAN, DAY_S, publish, serve
from tests.fakes.sharing_hosts import MODEL, NOON, SharingHost, combined_ids
from tests.kit.stacks import stack_in
from tests.unit.serving import bundles
from tests.unit.watcher import test_drift_duty as drifting
from tests.unit.watcher import test_quality_duty as labelling

Host = Callable[[str], SharingHost]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    return lambda name: SharingHost(tmp_path, str(tmp_path / "store"), name, combines=True)


def agent_at(home: Path, model: str, version: int) -> None:
    """What an agent leaves in its home."""
    stack_in(home, agent=True)
    route = ModelRoute(model=model, epoch=1, stable=Release(model=model, version=version))
    (home / "agent").mkdir(exist_ok=True)
    state = DesiredState(seq=1, term=1, by="c", t=0.0, routes=(route,))
    (home / "agent" / "desired.json").write_bytes(state.dump())


def test_rows_of_all_hosts_are_copied_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_hosts, "_BATCH_ROWS", 3)
    a, b = host("a"), host("b")
    followed: list[int] = []
    for number in range(1, 6):
        a.record(number)
        b.record(10 * number, 10 * number + 1)
        b.record(10 * number + 2, t=NOON + 3600)
        if number == 3:
            b.merge()
        for each in (b, a, b, a):
            each.share()
        after = f"{followed[-1]:012d}" if followed else None
        new = parts(combined_home(a.home), MODEL, after=after)
        assert sum(part.rows for part in new) == 4
        followed.append(max(part.last for part in new))
        assert combined_ids(a) == combined_ids(b) == a.ids()
    b.merge()
    for each in (b, a):
        each.share(NOON + 86_400)
    assert combined_ids(a) == a.ids()
    assert len(combined_ids(a)) == 20


def test_copies_that_were_lost_are_made_again_with_later_numbers(host: Host) -> None:
    a, b = host("a"), host("b")
    b.send(1)
    a.share()
    (before,) = parts(combined_home(a.home), MODEL)
    shutil.rmtree(a.home / "cache")
    a.restart()
    a.share()
    assert combined_ids(a) == ["b1"]
    (after,) = parts(combined_home(a.home), MODEL)
    assert after.last >= before.last


def test_rows_that_are_to_be_deleted_are_deleted_in_copies_and_not_copied_again(host: Host) -> None:
    a, b = host("a"), host("b")
    b.send(1, 2)
    a.share()
    assert combined_ids(a) == ["b1", "b2"]
    write_request(a.records.files, MODEL, "passenger_id = 2", t=NOON, by="somebody")
    for now in (NOON + 100, NOON + 103):
        a.share(now)
    assert combined_ids(a) == ["b1"]
    shutil.rmtree(combined_home(a.home))  # b has not deleted its rows yet
    a.share(NOON + 110)
    assert combined_ids(a) == ["b1"]
    assert a.ids() == ["b1", "b2"]


def test_drift_is_judged_by_the_rows_of_all_hosts(host: Host, tmp_path: Path) -> None:
    drifting.publish(tmp_path)
    a, b = host("a"), host("b")
    agent_at(a.home, drifting.NAME, 1)
    assert [(each.name, each.live) for each in served_models(a.home)] == [(drifting.NAME, 1)]
    duty = DriftDuty(a.home, AlertBook(a.home))
    drifting.record(a.home, range(30))
    drifting.tick(a.home, 30, duty)  # without the records of the others it does not begin
    assert not (a.home / "watch" / "drift").exists()
    drifting.record(b.home, range(30, 60), unseen=0.2)
    for each in (b, a):
        each.share(drifting.START + 3600.0)
    drifting.tick(a.home, 60, duty)
    assert drifting.release_state(a.home)["rows"] == 60 * 300
    assert [opened.alert.key for opened in read_alerts(a.home, drifting.NAME).open] == [drifting.KEY]
    drifting.tick(a.home, 61)  # another process counts nothing again
    assert drifting.release_state(a.home)["rows"] == 60 * 300


def test_the_watcher_of_another_host_continues_with_its_own_copies_and_counts_no_row_again(
    host: Host, tmp_path: Path
) -> None:
    drifting.publish(tmp_path)
    a, b, state = host("a"), host("b"), tmp_path / "state"
    for each in (a, b):
        agent_at(each.home, drifting.NAME, 1)

    def watch(where: Path, minute: int) -> None:
        DriftDuty(where, AlertBook(state), state).tick(drifting.START + 60.0 * minute)

    drifting.record(a.home, range(30))
    drifting.record(b.home, range(30, 60), unseen=0.2)
    for each in (a, b, a):
        each.share(drifting.START + 3600.0)
    watch(a.home, 60)
    before = drifting.release_state(state)
    assert before["rows"] == 60 * 300
    watch(b.home, 61)
    assert drifting.release_state(state)["rows"] == before["rows"]
    drifting.record(a.home, range(60, 130), unseen=0.2)
    for each in (a, b):
        each.share(drifting.START + 3 * 3600.0)
    watch(b.home, 130)
    assert drifting.release_state(state)["rows"] == 130 * 300
    a.share(drifting.START + 3 * 3600.0)
    watch(a.home, 131)  # it leads again
    assert drifting.release_state(state)["rows"] == 130 * 300
    view = read_alerts(state, drifting.NAME)
    assert ([each.alert.key for each in view.open], view.resolved) == ([drifting.KEY], ())


def test_live_quality_is_that_of_the_rows_of_all_hosts(host: Host) -> None:
    bundle = publish(Store.open(), 0.0)
    a, b = host("a"), host("b")
    served = [serve(each.home, bundle, 400, seed=seed) for seed, each in enumerate((a, b))]
    labelling.follow(a.home, BEGAN + 60)  # it has counted its own rows before
    for each in (b, a):
        each.share(BEGAN + 3600)
    assert records_home(a.home, bundles.MODEL) == combined_home(a.home)
    for each in served:
        labelling.add(a.home, bundle, each.labels(np.arange(len(each.ids))), BEGAN + DAY_S)
    (release,) = labelling.follow(a.home, BEGAN + 2 * DAY_S).releases
    assert (release.recorded, release.labelled) == (800, 800)
    truth = np.concatenate([each.late for each in served])
    scores = np.concatenate([each.scores for each in served])
    assert release.metrics["auc"].value == pytest.approx(metrics.auc(truth, scores))
    assert asdict(release)["recorded"] == 800


def test_a_home_without_an_agent_follows_its_own_records(host: Host, tmp_path: Path) -> None:
    a, b = host("a"), host("b")
    b.send(1)
    a.share()
    assert records_home(a.home, MODEL) != a.home
    ShareDuty(a.home, AlertBook(a.home))
    assert records_home(a.home, MODEL) == a.home
