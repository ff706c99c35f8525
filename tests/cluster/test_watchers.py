"""One watcher for three hosts: watchers on all of them, a store in a fourth namespace, and leaders that are killed."""

import http.client
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from serin.formats.cluster.leader import Leader
from serin.formats.drift import SHORTEST
from serin.store.mirror import State
from serin.watcher.cluster_state import LEADER, PREFIX
from tests.cluster.namespaces import end
from tests.cluster.serving_hosts import SERIN
from tests.fakes.drift import category_column, series_of, statistics_of
from tests.fakes.webhooks import Webhook, webhook
from tests.kit.waiting import until
from tests.parity.hosts import Hosts, hosts
from tests.parity.place import rows
from tests.parity.rollout_scenarios import RECORDED, fired
from tests.signals import hit

pytestmark = pytest.mark.timeout(2400)
DRIFTS, BURNS = "drifts", "burns"
LEASE_S, TAKE_OVER_S = 5.0, 10.0


class Scene:
    def __init__(self, place: Hosts, hook: Webhook) -> None:
        self.place, self.hook = place, hook
        self.sent = 0

    def read(self, key: str) -> bytes | None:
        with self.place.made.store_host.inside():
            found = self.place.made.objects.read(key)
        return found.content if found else None

    def leader(self) -> Leader:
        found = self.read(LEADER)
        assert found is not None
        return Leader.load(found)

    def watches_in(self) -> int:
        """The term of what the store has of the watcher's knowledge."""
        found = self.read(f"{PREFIX}/state.json")
        return State.load(found).term if found else 0

    def kill_leader(self) -> tuple[str, float]:
        """Returns the host that led, and the seconds until another one continued."""
        before = self.leader()
        host = before.holder.partition("/")[0]
        pid = self.place.made.members[host].pids()["watcher"]
        assert pid is not None
        hit(pid)
        began = time.monotonic()
        until(lambda: self.watches_in() > before.term, "another watcher continues", within_s=60, every_s=0.1)
        took = time.monotonic() - began
        assert self.leader().holder.partition("/")[0] != host
        return host, took

    def on(self, host: str, *words: str) -> Any:
        """The JSON of a command on a host."""
        return json.loads(self.place.made.members[host].serin(*words, "--json").stdout)

    def send(self, model: str, count: int, carrier: str | None = None) -> None:
        self.place.send(
            model, [rows(40, seed=self.sent + number, carrier=carrier) for number in range(count)]
        )
        self.sent += count


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    column = category_column("carrier", ["AA", "UA", "DL"])
    shares = (0.4, 0.3, 0.3, 0.0, 0.0, 0.0)
    known = statistics_of(
        [column], [series_of(0, shares, block=SHORTEST, tolerance=0.05)], false_alarms=100_000.0
    )
    drift = {"tolerance": 0.05, "columns": ["carrier"], "false_alarms": 100_000}
    with (
        tempfile.TemporaryDirectory(prefix="sw-") as folder,
        hosts(Path(folder)) as place,
        ExitStack() as ends,
    ):
        with place.inside():
            hook = ends.enter_context(webhook(place.address))
        place.made.members["b"].serin("alerts", "receivers", "add", "hook", hook.url)
        files = {"drift.json": json.dumps(known.to_json()).encode()}
        place.roll_out(DRIFTS, files=files, monitoring={**RECORDED, "drift": drift})
        place.roll_out(BURNS, objectives={"latency_ms": 0.001, "latency_share": 0.9999})
        yield Scene(place, hook)


def test_three_watchers_raise_one_alarm_and_the_next_leader_raises_no_second(scene: Scene) -> None:
    assert "hook" in {each["name"] for each in scene.on("c", "alerts", "receivers", "list")}
    deadline = time.monotonic() + 240
    while not fired(scene.hook, DRIFTS, "drift"):
        assert time.monotonic() < deadline, "no alarm"
        scene.send(DRIFTS, 1, carrier="rocket")
    (alert,) = fired(scene.hook, DRIFTS, "drift")
    until(lambda: scene.on("a", "alerts", "list")["open"], "the alert is in the store", within_s=30)
    before = {name: scene.on(name, "alerts", "list")["open"] for name in "abc"}
    assert len({json.dumps([each["id"] for each in found]) for found in before.values()}) == 1, before
    host, took = scene.kill_leader()
    print(f"\nkilled on {host}: another one continued after {took:.1f} s")
    assert took < LEASE_S + TAKE_OVER_S
    settled = time.monotonic() + 30
    while time.monotonic() < settled:
        scene.send(DRIFTS, 1, carrier="rocket")
    assert [each["key"] for each in fired(scene.hook, DRIFTS, "drift")] == [alert["key"]]
    ended = [each for each in scene.hook.got if each["event"] != "fired" and each["key"] == alert["key"]]
    assert ended == []
    for name in "abc":
        assert [each["id"] for each in scene.on(name, "alerts", "list")["open"]] == [
            each["id"] for each in before["a"]
        ]
        assert [each["column"] for each in scene.on(name, "drift", DRIFTS)["alarms"]] == ["carrier"]


def test_every_host_shows_the_budget_of_all_gateways(scene: Scene) -> None:
    def requests(name: str) -> int:
        (view,) = scene.on(name, "slo", DRIFTS)
        return int(view["objectives"][0]["requests"])

    def reaches(name: str) -> None:
        what = f"{scene.sent} requests on {name}"
        until(lambda: requests(name) == scene.sent, what, within_s=60, said=lambda: requests(name))

    scene.send(DRIFTS, 6)
    for name in "abc":
        reaches(name)


def test_a_silence_of_one_host_holds_when_another_one_leads(scene: Scene) -> None:
    scene.place.made.members["c"].serin("alerts", "silence", f"{BURNS}/*", "--why", "known")
    scene.kill_leader()
    deadline = time.monotonic() + 240
    found: list[Any] = []
    while not found:
        assert time.monotonic() < deadline, "no alert"
        scene.place.send(BURNS, [rows(1)] * 10, every_s=0.05)
        found = [each for each in scene.on("a", "alerts", "list")["open"] if each["alert"]["model"] == BURNS]
    assert all(each["silenced_until"] for each in found)
    scene.place.send(BURNS, [rows(1)] * 20, every_s=0.5)
    assert fired(scene.hook, BURNS, "objective") == []
    (silence,) = scene.on("b", "alerts", "list")["silences"]
    scene.place.made.members["b"].serin("alerts", "unsilence", str(silence["id"]))
    until(lambda: fired(scene.hook, BURNS, "objective"), "the alert is sent", within_s=60)
    keys = [each["key"] for each in fired(scene.hook, BURNS, "objective")]
    assert len(keys) == len(set(keys))


def test_the_console_on_any_host_shows_all_of_them(scene: Scene) -> None:
    member = scene.place.made.members["b"]
    log = member.home.with_suffix(".console.log")
    console = member.host.popen([*SERIN, "console", "run"], log=log, env=dict(member.variables))
    secret = member.serin("console", "secret", "operator").stdout.strip()
    shown = {
        "/": (DRIFTS, BURNS, "1 of 1 columns drifted"),
        "/alerts": ("carrier drifted", "too many requests are slow"),
        f"/models/{DRIFTS}/drift": ("carrier",),
        f"/models/{DRIFTS}/traffic": ("availability",),
        f"/models/{DRIFTS}/quality": (),
        f"/models/{DRIFTS}/rollout": ("promoted",),
        f"/models/{DRIFTS}": (DRIFTS,),
        "/rollouts": (DRIFTS,),
    }

    def call(method: str, path: str, body: str = "", **headers: str) -> tuple[int, str, Message]:
        with member.host.inside(), closing(http.client.HTTPConnection("127.0.0.1", 8090, timeout=60)) as wire:
            wire.request(method, path, body or None, {"host": "127.0.0.1:8090", **headers})
            answer = wire.getresponse()
            return answer.status, answer.read().decode(), answer.headers

    def up() -> bool:
        try:
            return call("GET", "/health")[0] == 200
        except OSError:
            assert console.poll() is None, log.read_text()
            return False

    try:
        until(up, "the console answers", within_s=120)
        form = {"content-type": "application/x-www-form-urlencoded", "origin": "http://127.0.0.1:8090"}
        status, said, headers = call("POST", "/login", urlencode({"secret": secret, "name": "Ada"}), **form)
        assert status == 303, said
        cookie = headers["set-cookie"].partition(";")[0]
        for path, words in shown.items():
            status, page, _ = call("GET", path, cookie=cookie)
            assert status == 200, f"{path}: {status} {page[-2000:]}"
            assert all(word in page for word in words), f"{path}: {words} {page[-3000:]}"
    finally:
        end(console)


def test_an_alert_about_one_host_is_seen_on_all(scene: Scene) -> None:
    """A gateway that is frozen is replaced, and its host's watcher reports it to the one that leads."""
    member = scene.place.made.members["c"]
    pid = member.pids()["gateway"]
    assert pid is not None
    hit(pid, signal.SIGSTOP)

    def seen() -> list[str]:
        return [each["alert"]["key"] for each in scene.on("a", "alerts", "list")["open"]]

    until(lambda: any(key.endswith("@c") for key in seen()), "an alert about c", within_s=120, said=seen)


def test_nothing_is_changed_while_no_watcher_leads(scene: Scene) -> None:
    for each in scene.place.made.members.values():
        assert each.process is not None
        end(each.process, grace_s=60.0)
        each.process = None
    done = scene.place.made.members["a"].serin("alerts", "silence", "x/*", check=False)
    assert done.returncode == 1
    assert "no watcher of the hosts" in done.stderr
    assert scene.on("a", "alerts", "list")["silences"] == []
