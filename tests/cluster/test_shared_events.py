"""Events of online windows that several hosts share in Valkey: one state, each event once, never a wrong number."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serin.errors import SpecError, StateUnavailable
from serin.formats.schema import INT64_NULL
from serin.machine.ports import free_ports
from serin.serving.windows.step import Step
from serin.windows.events import OnlineWindows
from serin.windows.valkey_place import ValkeyPlace
from serin.windows.valkey_state import ValkeyState
from tests.cluster.events_server import EventsServer
from tests.cluster.part import need
from tests.kit.waiting import until
from tests.unit.windows import test_same_bits
from tests.unit.windows.test_step import SECOND, ask_json, plan, step_of, windows_in

STORE = "s3://models/serin"
Connect = Callable[..., ValkeyState]


def now_us() -> int:
    return time.time_ns() // 1000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventsServer]:
    need("valkey")
    made = EventsServer(tmp_path_factory.mktemp("events") / "server", port=free_ports(1)[0])
    made.start()
    yield made
    made.close()


@pytest.fixture
def connect(server: EventsServer) -> Iterator[Connect]:
    made: list[ValkeyState] = []

    def state(place: ValkeyPlace | None = None, owner: str = STORE) -> ValkeyState:
        made.append(ValkeyState(place or server.place, owner))
        return made[-1]

    yield state
    for each in made:
        each.close()


def test_histories_that_two_hosts_replay_have_the_windows_of_the_etl(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_same_bits, "_CLOCKS", (now_us() // SECOND * SECOND,))  # what is old expires
    states = [connect(), connect()]
    for seed in range(100):
        test_same_bits.check_history(seed, states)


def test_events_that_hosts_count_at_the_same_moment_are_all_counted_once(connect: Connect) -> None:
    start, events = now_us(), 150
    hosts = [OnlineWindows("busy", plan(), connect()) for _ in range(3)]

    def send(number: int) -> None:
        row = {"at": [start], "id": [str(number)], "card": ["c1"], "amount": [1.0]}
        for turn in range(3):  # a client that sends again, to another gateway each time
            hosts[(number + turn) % 3].answer(row, [start])

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(send, range(events)))
    row = {"at": [start + 1], "id": ["last"], "card": ["c1"], "amount": [1.0]}
    assert hosts[0].answer(row, [start + 1]).columns == {"n": [events], "spent": [float(events)]}


@pytest.mark.parametrize("unavailable", ["refuse", "nulls"])
def test_a_server_that_is_killed_and_comes_back_costs_no_event_and_gives_no_wrong_number(
    tmp_path: Path, unavailable: str
) -> None:
    need("valkey")
    own = EventsServer(tmp_path / "server", port=free_ports(1)[0])
    own.start()
    state = ValkeyState(own.place, STORE)
    (tmp_path / "plans").mkdir()
    step = Step(tmp_path / "plans", lambda: state)
    (tmp_path / "plans" / "pay.json").write_bytes(plan(unavailable, span_s=3600).dump())
    try:
        assert [windows_in(ask_json(step, str(n), now_us(), 1.0))["n"] for n in range(3)] == [0, 1, 2]
        own.kill()
        answers = [ask_json(step, f"away {n}", now_us(), 1.0) for n in range(2)]
        if unavailable == "refuse":
            assert [each.status for each in answers] == [503, 503]
            assert step.counts["pay"] == {"counted": 3, "unavailable": 2}
        else:
            assert [windows_in(each)["n"] for each in answers] == [INT64_NULL] * 2
            assert step.counts["pay"] == {"counted": 3, "nulls": 2, "lost": 2}
        assert own.password not in "".join(each.body.decode(errors="replace") for each in answers)
        own.start()
        until(lambda: "problem" not in step.status(), "the events are there again", within_s=30)
        assert windows_in(ask_json(step, "back", now_us(), 1.0)) == {"n": 3, "spent": 3.0}
        assert windows_in(ask_json(step, "away 0", now_us(), 1.0)) == {"n": 4, "spent": 4.0}
    finally:
        state.close()
        own.close()


def test_keys_expire_and_a_key_takes_the_bytes_that_the_documentation_says(connect: Connect) -> None:
    state, start, keys = connect(), now_us(), 2000
    windows = OnlineWindows("sized", plan(span_s=3600), state)
    count, size = state.size()
    for first in range(0, keys, 500):
        cards = [f"c{n}" for n in range(first, first + 500)]
        for event in range(20):
            rows = {
                "at": [start + event] * 500,
                "id": [str(event)] * 500,
                "card": cards,
                "amount": [1.0] * 500,
            }
            windows.answer(rows, [start + event] * 500)
    more, grown = state.size()
    assert more - count == keys
    print(f"\n{(grown - size) / keys:.0f} bytes for each key of 20 events")
    assert 428 < (grown - size) / keys < 700
    old = start - 3 * 3600 * SECOND  # arrived long ago: a backfill of what nothing can see any more
    windows.answer({"at": [old], "id": ["x"], "card": ["old"], "amount": [1.0]}, [old])
    until(lambda: state.size()[0] <= more, "it is dropped", within_s=30)


def test_a_server_that_comes_back_with_other_settings_is_not_used_though_nobody_saw_it_away(
    tmp_path: Path,
) -> None:
    need("valkey")
    own = EventsServer(tmp_path / "server", port=free_ports(1)[0])
    own.start()
    state = ValkeyState(own.place, STORE)
    (tmp_path / "plans").mkdir()
    step = step_of(tmp_path / "plans", state, clock=now_us())
    try:
        assert ask_json(step, "a", now_us(), 1.0).status == 200
        own.kill()
        with (own.folder / "valkey.conf").open("a") as settings:
            settings.write("appendonly no\n")
        own.start()
        refused = ask_json(step, "b", now_us(), 1.0)
        assert (refused.status, b"set `appendonly yes`" in refused.body) == (503, True)
    finally:
        state.close()
        own.close()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"appendonly": "no"}, "set `appendonly yes`"),
        ({"maxmemory_policy": "allkeys-lru"}, "set `maxmemory-policy noeviction`"),
        ({"replicaof": "127.0.0.1 1"}, "it is a replica"),
    ],
)
def test_a_server_that_would_forget_events_is_not_used(
    tmp_path: Path, settings: dict[str, str], problem: str
) -> None:
    need("valkey")
    own = EventsServer(tmp_path / "server", port=free_ports(1)[0], **settings)
    own.start()
    state = ValkeyState(own.place, STORE)
    try:
        with pytest.raises(StateUnavailable, match=problem):
            state.update([b"k"], lambda _: {b"k": b"v"})
    finally:
        state.close()
        own.close()


def test_a_wrong_password_another_authority_and_another_store_are_refused(
    connect: Connect, server: EventsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    connect().size()

    def problem(
        file: Path = server.password_file, authority: Path = server.authority, owner: str = STORE
    ) -> str:
        state = connect(ValkeyPlace.read(server.url, file, authority), owner)
        with pytest.raises(StateUnavailable) as raised:
            state.size()
        return str(raised.value)

    wrong, open_to_all = tmp_path / "wrong", tmp_path / "open"
    wrong.write_text("not-the-password")
    wrong.chmod(0o600)
    open_to_all.write_text(server.password)
    open_to_all.chmod(0o644)
    found = [
        problem(wrong),
        problem(open_to_all),
        problem(authority=Path("/etc/ssl/certs/ca-certificates.crt")),
        problem(owner="s3://others/serin"),
    ]
    for text, part in zip(
        found,
        ["password", "can be read by others", "certificate verify failed", "another store"],
        strict=True,
    ):
        assert part in text
    said = "".join(found) + caplog.text
    assert server.password not in said
    assert "not-the-password" not in said


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("valkeys://:geheim@v:6380/0", "holds a password"),
        ("http://v:6380/0", "is not a URL such as"),
        ("valkeys://v:6380/a", "is not a URL such as"),
        ("valkeys://v:99999", "is not a valid URL"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_showing_it(url: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as raised:
        ValkeyPlace.read(url)
    assert "geheim" not in str(raised.value)


def test_a_request_does_not_wait_for_a_server_that_is_away(connect: Connect, tmp_path: Path) -> None:
    place = ValkeyPlace.read(f"valkeys://127.0.0.1:{free_ports(1)[0]}/0")
    step = step_of(tmp_path, connect(place), clock=now_us())
    for _ in range(1000):
        assert ask_json(step, "a", now_us(), 1.0).status == 503
