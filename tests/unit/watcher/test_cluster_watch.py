"""One watcher for several hosts, over a shared folder: what a leader takes over, adds up, refuses and never repeats."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import AlertRefused, LeadershipLost, ReceiverRefused, StoreUnreachable, WatcherSilent
from serin.formats.cluster.leader import KEY
from serin.host.state import Stack, write_stack
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.monitoring.alerts.delivery import Delivery
from serin.monitoring.alerts.outbox import Message, Outbox
from serin.monitoring.history.read import models_with_history, read_history, window_sums
from serin.monitoring.history.sketch import EMPTY, Series, Tally
from serin.monitoring.history.store import History
from serin.monitoring.rollbacks import Rollback, read_rollbacks, save_rollbacks
from serin.rollout.run.leadership import Leadership
from serin.store.objects import FolderObjects
from serin.watcher import cluster_state
from serin.watcher.cluster_state import LEADER, PREFIX, Request, SharedBook, find_book, watch_home
from serin.watcher.cluster_watch import HostReport, HostsDuty, Led, RequestsDuty
from serin.watcher.duty import Duty
from serin.watcher.served import state_home

NOW = 1_790_000_000.0 // 3600 * 3600
ALERT = Alert(
    key="taxis/drift/zone", kind="drift", model="taxis", severity="page", title="zone", text="", since=NOW
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderObjects:
    folder = tmp_path / "store"
    monkeypatch.setenv("SERIN_STORE", str(folder))
    made = FolderObjects(folder)
    made.put(KEY, b"{}")  # a controller has led
    return made


def host(tmp_path: Path, name: str) -> Path:
    home = tmp_path / name
    home.mkdir()
    write_stack(Stack(home=home, gateway_port=1, agent=True))
    return home


def elected(store: FolderObjects, name: str, clock: Clock) -> Leadership:
    leadership = Leadership(store, f"{name}/1", clock, key=LEADER)
    leadership.step()
    if leadership.term is None:  # another one led until now
        clock.now += 5.0
        leadership.step()
    assert leadership.term is not None
    return leadership


@contextmanager
def led(home: Path, store: FolderObjects, leadership: Leadership, *duties: Duty) -> Iterator[Led]:
    assert leadership.term is not None
    made = Led(home, store, leadership, leadership.term, lambda *_: duties)
    try:
        yield made
    finally:
        made.close()


def count(home: Path, arm: str, start: float, requests: int, slow: int = 0) -> None:
    history = History(home)
    numbers = {"requests": requests, "errors": 0, "saved": 0, "slow": slow, "refused": 0}
    found = Tally(latency=EMPTY, **numbers)
    with history._transaction():
        history._add({(Series("taxis", "taxis-v1", arm), int(start)): found})
    history.close()


def test_the_next_leader_has_the_alerts_and_rollbacks_and_fires_nothing_twice(
    store: FolderObjects, tmp_path: Path
) -> None:
    clock = Clock()
    one, two = host(tmp_path, "a"), host(tmp_path, "b")
    first = elected(store, "a", clock)
    made = Rollback(t=NOW, from_version=2, to_version=1, by="quality", why="worse", command="c1")
    with led(one, store, first) as leader:
        AlertBook(leader.state).fire(ALERT, NOW)
        save_rollbacks(leader.state, "taxis", (made,))
        leader.commit()
    second = elected(store, "b", clock)
    with led(two, store, second) as leader:
        assert state_home(two) == leader.state
        assert read_rollbacks(leader.state, "taxis") == (made,)
        AlertBook(leader.state).fire(ALERT, NOW + 60)
        assert len([each for each in Outbox(leader.state).due(NOW + 60) if each.receiver == "log"]) == 1
        leader.keep()
    assert state_home(two) is None
    for home in (one, two):
        (seen,) = read_alerts(watch_home(home, "alerts"), now=NOW + 60).open
        assert (seen.alert.key, seen.fired) == (ALERT.key, NOW)


def test_a_leader_that_was_frozen_and_replaced_sends_nothing(store: FolderObjects, tmp_path: Path) -> None:
    clock = Clock()
    first = elected(store, "a", clock)
    sent = list[Message]()

    class Channel:
        def send(self, message: Message) -> None:
            sent.append(message)

    with led(host(tmp_path, "a"), store, first) as old:
        AlertBook(old.state).fire(ALERT, time.time())
        clock.now += 100.0
        with pytest.raises(LeadershipLost):
            old.commit()
        with led(host(tmp_path, "b"), store, elected(store, "b", clock)):
            delivery = Delivery(Outbox(old.state), lambda: {"log": Channel()}, commit=old.commit)
            delivery._look()
            delivery._look()
            assert sent == []
        first._renewed_at = clock.now  # its clock is wrong as well: the store refuses it
        first._mine = first.leader
        with pytest.raises(LeadershipLost):
            old.commit()


def test_requests_of_all_hosts_are_added_up_and_a_report_that_comes_again_counts_once(
    store: FolderObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {name: host(tmp_path, name) for name in "abc"}
    state = tmp_path / "led"
    duty = HostsDuty(state, store, AlertBook(state))
    reports = {}
    for number, (name, home) in enumerate(homes.items(), 1):
        monkeypatch.setenv("SERIN_HOST", name)
        count(home, "stable", NOW, 10 * number, slow=number)
        reports[name] = HostReport(home, store)
        reports[name].send(NOW + 30)
    for _ in range(2):
        duty.tick(NOW + 60)
    assert window_sums(state, "taxis", NOW + 60, [300])[300] == {"taxis-v1": (60, 0, 6, 0)}
    before = duty._history._db.total_changes
    duty.tick(NOW + 61)
    assert duty._history._db.total_changes == before, (
        "what has not changed is not written: it would be uploaded"
    )
    count(homes["a"], "stable", NOW, 5)
    count(homes["a"], "stable", NOW + 3600, 7)
    reports["a"]._due = 0.0
    reports["a"].send(NOW + 3660)
    duty.tick(NOW + 3660)
    assert window_sums(state, "taxis", NOW + 3660, [7200])[7200] == {"taxis-v1": (72, 0, 6, 0)}
    found = read_history(state, "taxis", NOW, NOW + 7200)
    assert found is not None
    assert [(each.arm, sum(point.requests for point in each.points)) for each in found.series] == [
        ("stable", 72)
    ]
    late = NOW + 4 * 3600
    duty.tick(late)
    assert duty._history.taken("a") > duty._history.taken("zz") == ""
    for _ in range(2):  # the last hour is taken, then it is not needed any more
        duty.tick(NOW + 4 * 86_400)
    assert [key for key in store.keys(f"{PREFIX}/hosts/") if "/history/" in key] == []
    assert models_with_history(state) == ["taxis"]
    duty.close()


def test_an_alert_of_a_host_is_that_of_all_until_the_host_ends_it_or_is_silent(
    store: FolderObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, state = host(tmp_path, "a"), tmp_path / "led"
    monkeypatch.setenv("SERIN_HOST", "a")
    duty, report, book = HostsDuty(state, store, AlertBook(state)), HostReport(home, store), AlertBook(home)
    book.fire(ALERT, NOW)
    report.send(NOW)
    duty.tick(NOW)
    (seen,) = read_alerts(state, now=NOW).open
    assert (seen.alert.key, seen.alert.title) == ("taxis/drift/zone@a", "zone (host a)")
    book.resolve(ALERT.key, NOW + 5)
    report._due = 0.0
    report.send(NOW + 5)
    duty.tick(NOW + 5)
    assert [each.ended for each in read_alerts(state, now=NOW + 5).resolved] == ["resolved"]
    book.fire(ALERT, NOW + 10)
    report._due = 0.0
    report.send(NOW + 10)
    duty.tick(NOW + 10)
    store.remove(f"{PREFIX}/hosts/a/alerts.json")  # as `serin hosts remove` leaves it
    duty.tick(NOW + 20)
    (ended, _) = read_alerts(state, now=NOW + 20).resolved
    assert "does not report any more" in ended.ended
    duty.close()


@contextmanager
def answering(state: Path, store: FolderObjects) -> Iterator[None]:
    """A leader that does what it is asked for."""
    stop, duty = threading.Event(), RequestsDuty(state, store, lambda: None)

    def run() -> None:
        while not stop.wait(0.02):
            duty.tick(0.0)

    thread = threading.Thread(target=run)
    thread.start()
    with ExitStack() as ends:
        ends.callback(thread.join)
        ends.callback(stop.set)
        yield


def test_people_change_what_the_leader_knows_from_any_host(store: FolderObjects, tmp_path: Path) -> None:
    home, state = host(tmp_path, "a"), tmp_path / "led"
    AlertBook(state).fire(ALERT, NOW)
    book = find_book(home)
    assert isinstance(book, SharedBook)
    with answering(state, store):
        book.add_receiver("team", "http://127.0.0.1:1/secret")
        with pytest.raises(ReceiverRefused, match="there is one of this name"):
            book.add_receiver("team", "http://127.0.0.1:1/other")
        made = book.silence(pattern="taxis/*", until=NOW + 600, by="ann", now=NOW)
        before = book.acknowledge(ALERT.key, by="ann", note="mine", now=NOW)
        assert before.acknowledged is None
        with pytest.raises(AlertRefused, match="no alert 'taxis/drift/zona' is open"):
            book.acknowledge("taxis/drift/zona", by="ann", now=NOW)
        book.remove_receiver("team")
    seen = read_alerts(state, now=NOW)
    assert [each.id for each in seen.silences] == [made.id]
    assert seen.open[0].acknowledged_by == "ann"
    assert store.keys(f"{PREFIX}/requests/") == []


def test_a_request_that_is_done_again_after_a_crash_changes_nothing_more(
    store: FolderObjects, tmp_path: Path
) -> None:
    state = tmp_path / "led"
    asked = {"pattern": "*", "model": None, "until": NOW + 600, "by": "ann", "why": "", "now": NOW}
    request = Request(what="silence", arguments=asked)
    for _ in range(2):
        store.put(f"{PREFIX}/requests/{request.id}.json", request.dump())
        RequestsDuty(state, store, lambda: None).tick(0.0)
    assert len(read_alerts(state, now=NOW).silences) == 1


@pytest.mark.parametrize(
    ("what", "arguments", "name"),
    [
        ("acknowledge", {"key": "taxis/disk", "by": "eve", "now": NOW}, "fraud-eu.{}"),
        ("silence", {"pattern": "*", "until": NOW + 600, "by": "eve", "now": NOW}, "fraud-eu.{}"),
        ("add_labels", {"model": "taxis"}, "fraud-eu.{}"),
        ("add_labels", {"model": "fraud-eu", "key": "policy.json"}, "fraud-eu.{}x"),
    ],
)
def test_a_request_in_the_object_of_another_model_is_not_obeyed_and_removes_nothing(
    store: FolderObjects, tmp_path: Path, what: str, arguments: dict[str, object], name: str
) -> None:
    """A store's rules say who may write which of them."""
    store.put("policy.json", b"{}")
    request = Request(what=what, arguments=arguments)
    store.put(f"{PREFIX}/requests/{name.format(request.id)}.json", request.dump())
    RequestsDuty(tmp_path / "led", store, lambda: None).tick(0.0)
    assert store.keys(f"{PREFIX}/") == []
    assert store.read("policy.json") is not None
    assert read_alerts(tmp_path / "led", now=NOW).silences == ()


def test_what_a_leader_does_not_know_is_not_accepted_in_silence(
    store: FolderObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_state, "_ANSWER_S", 0.5)
    with answering(tmp_path / "led", store), pytest.raises(WatcherSilent):
        SharedBook(store)._ask("delete_everything")
    with pytest.raises(WatcherSilent, match="nothing was changed"):  # nobody leads
        SharedBook(store).end_silence(1, by="ann", now=NOW)
    assert store.keys(f"{PREFIX}/requests/") == []
    store.put(f"{PREFIX}/requests/x.json", json.dumps({"format": "another"}).encode())
    RequestsDuty(tmp_path / "led", store, lambda: None).tick(0.0)
    assert store.keys(f"{PREFIX}/requests/") == []


HUGE = 10**400
FOOTER = b"PAR1" + b"x" * 50 + (40).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("acknowledge", {"by": ["x"], "now": NOW}),
        ("acknowledge", {"by": "eve", "now": "x"}),
        ("acknowledge", {"by": "eve", "now": HUGE}),
        ("acknowledge", {"by": {}, "note": None, "now": None}),
        ("acknowledge", {"by": "eve", "now": NOW, "colour": "red"}),
        ("acknowledge", {"by": "eve"}),
        ("acknowledge", {"by": "\ud800", "now": NOW}),
        ("add_labels", {"model": "fraud-eu", "content": b"not Parquet"}),
        ("add_labels", {"model": "fraud-eu", "content": FOOTER}),
        ("add_labels", {"model": "fraud-eu", "content": b""}),
    ],
)
def test_a_request_that_cannot_be_done_holds_up_none_of_another_model(
    store: FolderObjects, tmp_path: Path, what: str, arguments: dict[str, object]
) -> None:
    """Requests to the watcher about one model must not stop those of others."""
    state, content = tmp_path / "led", arguments.pop("content", None)
    for model in ("fraud-eu", "payments"):
        AlertBook(state).fire(replace(ALERT, key=f"{model}/disk", model=model), NOW)
    given = arguments if what == "add_labels" else {"key": "fraud-eu/disk", **arguments}
    bad = Request(what=what, arguments=given)
    good = Request(what="acknowledge", arguments={"key": "payments/disk", "by": "ann", "now": NOW})
    for each in (bad, good):
        store.put(f"{PREFIX}/requests/{each.name}.json", each.dump())
    if content is not None:
        store.put(bad.labels, content)
    RequestsDuty(state, store, lambda: None).tick(0.0)
    assert store.keys(f"{PREFIX}/requests/") == store.keys(f"{PREFIX}/labels/") == []
    assert [each.alert.key for each in read_alerts(state).open if each.acknowledged] == ["payments/disk"]
    assert list(state.rglob(".taken-*")) == []


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), StoreUnreachable(url="s3://x", reason="busy")]
)
def test_a_request_waits_while_what_it_needs_is_not_there(
    store: FolderObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    request = Request(what="add_labels", arguments={"model": "fraud-eu"})
    store.put(request.labels, b"x")
    store.put(f"{PREFIX}/requests/{request.name}.json", request.dump())

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cluster_state, "take_label_file", fail)
    with pytest.raises(type(error)):
        RequestsDuty(tmp_path / "led", store, lambda: None).tick(0.0)
    assert len(store.keys(f"{PREFIX}/requests/")) == len(store.keys(f"{PREFIX}/labels/")) == 1


def test_an_answer_about_one_model_names_no_alert_of_another(store: FolderObjects, tmp_path: Path) -> None:
    state = tmp_path / "led"
    for key in ("fraud-eu/disk", "fraudulent/disk", "payments/disk"):
        AlertBook(state).fire(replace(ALERT, key=key, model=key.partition("/")[0]), NOW)
    request = Request(what="acknowledge", arguments={"key": "fraud-eu/no", "by": "eve", "now": NOW})
    store.put(f"{PREFIX}/requests/{request.name}.json", request.dump())
    RequestsDuty(state, store, lambda: None).tick(0.0)
    stored = store.read(f"{PREFIX}/answers/{request.name}.json")
    assert stored is not None
    assert json.loads(stored.content)["result"] == {"key": "fraud-eu/no", "known": ["fraud-eu/disk"]}
