"""Drift and live quality where several hosts serve: each host counts the records of all of them, every row once."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serin import metrics
from serin.formats.cluster.desired_state import DesiredState
from serin.formats.forget_requests import read_applied, write_request
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.monitoring.capture import read
from serin.monitoring.capture.read import batches, read_part
from serin.store.artifacts import ModelRoute, Release
from serin.store.store import Store
from serin.watcher.drift_duty import DriftDuty
from serin.watcher.served import followed_models, followed_records, served_models
from tests.fakes.live_quality import BEGAN, DAY_S, publish, serve
from tests.fakes.sharing_hosts import MODEL, NOON, SharingHost, followed_ids
from tests.kit.stacks import stack_in
from tests.unit.serving import bundles
from tests.unit.watcher import test_drift_duty as drifting
from tests.unit.watcher import test_quality_duty as labelling

Host = Callable[[str], SharingHost]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    return lambda name: SharingHost(tmp_path, str(tmp_path / "store"), name)


def agent_at(home: Path, model: str, version: int) -> None:
    """What an agent leaves in its home."""
    stack_in(home, agent=True)
    route = ModelRoute(model=model, epoch=1, stable=Release(model=model, version=version))
    (home / "agent").mkdir(exist_ok=True)
    state = DesiredState(seq=1, term=1, by="c", t=0.0, routes=(route,))
    (home / "agent" / "desired.json").write_bytes(state.dump())


def seen_of(host: SharingHost, seen: dict[str, str]) -> list[str]:
    """The ids of what is new since the last call."""
    found = []
    with followed_records(host.home, MODEL) as sources:
        for name, source in (sources or {}).items():
            for batch in batches(source, MODEL, after=seen.get(name)):
                found += [each for part in batch for each in read_part(part)["_id"].to_pylist()]
                seen[name] = batch[-1].sequence
    return sorted(found)


def test_rows_of_all_hosts_are_followed_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_BATCH_ROWS", 3)
    a, b, seen = host("a"), host("b"), dict[str, str]()
    a.lead()
    everything = list[str]()
    for number in range(1, 6):
        a.record(number)
        b.record(10 * number, 10 * number + 1)
        b.record(10 * number + 2, t=NOON + 3600)
        if number == 3:
            b.merge()
        for each in (b, a):
            each.share()
        new = seen_of(a, seen)
        assert len(new) == 4
        everything = sorted(everything + new)
        assert everything == followed_ids(a) == a.ids()
    b.merge()
    for each in (b, a):
        each.share(NOON + 86_400)
    assert (seen_of(a, seen), followed_ids(a)) == ([], everything)
    assert len(everything) == 20


def test_a_host_that_takes_over_follows_from_where_the_other_was(host: Host) -> None:
    a, b, seen = host("a"), host("b"), dict[str, str]()
    a.lead()
    a.record(1)
    b.record(2)
    for each in (b, a):
        each.share()
    assert seen_of(a, seen) == ["a1", "b2"]
    a.lead_no_more()
    b.lead()
    a.send(3)
    assert seen_of(b, seen) == []  # nothing is copied yet
    b.send(4)
    assert seen_of(b, seen) == ["a3", "b4"]


def test_copies_that_were_lost_are_made_again(host: Host) -> None:
    a, b, seen = host("a"), host("b"), dict[str, str]()
    a.lead()
    b.send(1)
    a.share()
    assert seen_of(a, seen) == ["b1"]
    shutil.rmtree(a.home / "cache")
    b.send(2)
    a.restart()
    a.share()
    assert (seen_of(a, seen), followed_ids(a)) == (["b2"], ["b1", "b2"])


class Replaced:
    """Files of a store that were replaced before they could be fetched."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def download(self, files: Mapping[str, Path]) -> None:
        raise FileNotFoundError(*files)


def test_nothing_is_followed_while_copies_are_not_complete(host: Host) -> None:
    a, b, seen = host("a"), host("b"), dict[str, str]()
    a.lead()
    b.send(1)
    a.share()
    assert seen_of(a, seen) == ["b1"]
    b.record(2)
    b.record(3, t=NOON + 3600)
    b.share()
    a.share(wrap=Replaced)
    assert (seen_of(a, seen), followed_models(a.home)) == ([], [])
    b.merge()
    b.share(NOON + 86_400)
    a.share()
    assert seen_of(a, seen) == ["b2", "b3"]


def test_a_host_that_does_not_lead_copies_nothing(host: Host) -> None:
    a, b = host("a"), host("b")
    stack_in(a.home, agent=True)
    b.send(1)
    a.share()
    assert not list(a.home.rglob("*.parquet"))
    with followed_records(a.home, MODEL) as sources:
        assert sources is None


def test_drift_is_judged_by_the_rows_of_all_hosts(host: Host, tmp_path: Path) -> None:
    drifting.publish(tmp_path)
    a, b = host("a"), host("b")
    agent_at(a.home, drifting.NAME, 1)
    a.lead()
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


def test_the_watcher_of_another_host_continues_and_counts_no_row_again(host: Host, tmp_path: Path) -> None:
    drifting.publish(tmp_path)
    a, b, state = host("a"), host("b"), tmp_path / "state"
    for each in (a, b):
        agent_at(each.home, drifting.NAME, 1)

    def watch(leader: SharingHost, minute: int) -> None:
        leader.lead(state)
        leader.share(drifting.START + 60.0 * minute)
        DriftDuty(leader.home, AlertBook(state), state).tick(drifting.START + 60.0 * minute)
        leader.lead_no_more()

    drifting.record(a.home, range(30))
    drifting.record(b.home, range(30, 60), unseen=0.2)
    b.share(drifting.START + 3600.0)
    watch(a, 60)
    before = drifting.release_state(state)
    assert before["rows"] == 60 * 300
    watch(b, 61)
    assert drifting.release_state(state)["rows"] == before["rows"]
    drifting.record(a.home, range(60, 130), unseen=0.2)
    a.share(drifting.START + 3 * 3600.0)
    watch(b, 130)
    assert drifting.release_state(state)["rows"] == 130 * 300
    watch(a, 131)  # it leads again
    assert drifting.release_state(state)["rows"] == 130 * 300
    view = read_alerts(state, drifting.NAME)
    assert ([each.alert.key for each in view.open], view.resolved) == ([drifting.KEY], ())


def test_live_quality_is_that_of_the_rows_of_all_hosts(host: Host) -> None:
    bundle = publish(Store.open(), 0.0)
    a, b = host("a"), host("b")
    served = [serve(each.home, bundle, 400, seed=seed) for seed, each in enumerate((a, b))]
    labelling.follow(a.home, BEGAN + 60)  # it has counted its own rows before
    a.lead()
    for each in (b, a):
        each.share(BEGAN + 3600)
    for each in served:
        labelling.add(a.home, bundle, each.labels(np.arange(len(each.ids))), BEGAN + DAY_S)
    (release,) = labelling.follow(a.home, BEGAN + 2 * DAY_S).releases
    assert (release.recorded, release.labelled) == (800, 800)
    truth = np.concatenate([each.late for each in served])
    scores = np.concatenate([each.scores for each in served])
    assert release.metrics["auc"].value == pytest.approx(metrics.auc(truth, scores))
    assert asdict(release)["recorded"] == 800


def test_labels_go_with_the_rows_of_any_host_that_are_deleted(host: Host) -> None:
    bundle = publish(Store.open(), 0.0)
    a, b = host("a"), host("b")
    served = [serve(each.home, bundle, 100, seed=seed) for seed, each in enumerate((a, b))]
    kept = list[list[str]]()
    a.lead().on_keep = lambda: kept.append(a.all_hosts(bundles.MODEL).newest(300)["_id"].to_pylist())
    for each in (b, a):
        each.share(BEGAN + 3600)
    for each in served:
        labelling.add(a.home, bundle, each.labels(np.arange(len(each.ids))), BEGAN + DAY_S)
    labelling.follow(a.home, BEGAN + DAY_S + 60)
    where = " or ".join(f"_id = '{each.ids[7]}'" for each in served)
    write_request(a.records.files, bundles.MODEL, where, t=BEGAN + DAY_S, by="somebody")
    for now in (60.0, 63.0):
        a.share(BEGAN + 2 * DAY_S + now)
    assert {each.ids[7] for each in served} <= set(kept[0]), "labels are kept before a row is deleted"
    applied = read_applied(a.records.files, bundles.MODEL)[1]["a"]
    assert (applied.rows, applied.labels, applied.others) == (1, 2, {"b": 1})
    (release,) = labelling.follow(a.home, BEGAN + 2 * DAY_S + 90).releases
    assert (release.recorded, release.labelled) == (198, 198)


def test_a_home_without_an_agent_follows_its_own_records(host: Host) -> None:
    a, b = host("a"), host("b")
    b.send(1)
    a.send(2)
    assert seen_of(a, {}) == ["a2"]
