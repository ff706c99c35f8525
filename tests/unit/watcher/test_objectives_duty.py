"""The objectives' duty over real logs, journals, alerts and a controller; releases and traffic are made up."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from serin.host.wiring import request_log
from serin.monitoring.alerts.book import AlertBook, read_alerts
from serin.monitoring.objectives.burn import PERIOD_S
from serin.monitoring.objectives.read import read_objectives
from serin.monitoring.rollbacks import read_rollbacks
from serin.rollout.decide.state import Phase
from serin.rollout.run.commands import Mailbox
from serin.rollout.run.status import history as decisions
from serin.rollout.run.status import model_status
from serin.spec.objectives import ObjectivesSpec
from serin.store.artifacts import Endpoint, Release
from serin.store.store import Store
from serin.watcher.history_duty import HistoryDuty, Promise, Promises
from serin.watcher.objectives_duty import ObjectivesDuty
from tests.fakes.rollout import home_inbox
from tests.fakes.small_pipeline import NAME, small_spec, write_spec
from tests.kit.commands import serin_main as serin
from tests.kit.elsewhere import register
from tests.unit.monitoring.request_lines import GOOD, append
from tests.unit.rollout.conftest import Scene

T = 1_800_000_000.0
KEY = "flights/objective/availability"


class Told(Promises):
    """The promises of versions, without a store."""

    def __init__(self, home: Path, promise: Promise) -> None:
        super().__init__(home)
        self.promise = promise

    def of(self, model: str, version: int) -> Promise:
        del model, version
        return self.promise


class World:
    """A controller with a model, the watcher's two duties, and traffic minute by minute."""

    def __init__(self, home: Path, *, rollback: bool = False) -> None:
        self.home, self.scene, self.now = home, Scene(home), T
        self.scene.clock.t = T - 7_200
        promises = Told(home, Promise(objectives=ObjectivesSpec(latency_ms=20.0), rollback=rollback))
        self._duties = (
            HistoryDuty(home, promises),
            ObjectivesDuty(home, AlertBook(home), promises),
        )

    def minute(
        self,
        version: int,
        *,
        requests: int = 100,
        bad: int = 0,
        slow: int = 0,
        gone: int = 0,
        waited_ms: int = 0,
    ) -> None:
        """A minute of traffic, then a tick of the duties. `gone`: clients that leave after `waited_ms`."""
        lines = [
            GOOD._replace(
                t=self.now + number * 60 / requests,
                release=f"flights-v{version}",
                code=503 if number < bad else 200,
                us=90_000.0 if bad <= number < bad + slow else 5_000.0,
            )
            for number in range(requests)
        ]
        left = {"code": 0, "us": None, "flags": "DR", "ms": waited_ms + 3.0, "received_ms": 3.0}
        lines[requests - gone :] = [each._replace(**left) for each in lines[requests - gone :]]
        append(request_log(self.home), lines)
        self.now += 60
        self.tick()

    def minutes(self, count: int, version: int, **traffic: int) -> None:
        for _ in range(count):
            self.minute(version, **traffic)

    def tick(self) -> None:
        for duty in self._duties:
            duty.tick(self.now)

    def promote(self, version: int) -> None:
        self.scene.clock.t = self.now - 10
        if version == 1:
            self.scene.promote_first(1)
        else:
            self.scene.command("start", version)
            self.scene.until(Phase.PROMOTED)

    def open_keys(self) -> list[str]:
        return [each.alert.key for each in read_alerts(self.home, now=self.now).open]

    def minutes_until_alert(self, version: int, most: int, **traffic: int) -> int | None:
        for minute in range(1, most + 1):
            self.minute(version, **traffic)
            if self.open_keys():
                return minute
        return None

    def close(self) -> None:
        for duty in self._duties:
            duty.close()
        self.scene.kill()


@pytest.fixture
def world(home: Path) -> Iterator[World]:
    made = World(home)
    yield made
    made.close()


@pytest.fixture
def strict(home: Path) -> Iterator[World]:
    """A model whose spec allows automatic rollbacks, with two versions; the second is live."""
    made = World(home, rollback=True)
    made.promote(1)
    made.minutes(30, 1)
    made.promote(2)
    yield made
    made.close()


def test_a_2_percent_wave_fires_in_its_window_and_resolves_after_it(world: World) -> None:
    world.promote(1)
    world.minutes(70, 1, requests=50)
    found = world.minutes_until_alert(1, 60, requests=50, bad=1)
    assert found is not None
    assert 40 <= found <= 50
    (alert,) = read_alerts(world.home, now=world.now).open
    assert (alert.alert.key, alert.alert.severity, alert.alert.release) == (KEY, "page", "flights-v1")
    assert T + 69 * 60 <= alert.alert.since <= T + 72 * 60
    world.minutes(40, 1, requests=50)
    assert world.open_keys() == []
    (past,) = read_alerts(world.home, now=world.now).resolved
    assert past.id == alert.id, "one alert from the beginning to the end"


def test_a_wave_of_half_the_budget_fires_nothing(world: World) -> None:
    world.promote(1)
    for minute in range(80):
        world.minute(1, requests=100, bad=1 if minute % 20 == 0 else 0)  # 0.05%
    assert world.open_keys() == []
    view = read_objectives(world.home, "flights", now=world.now)
    available, fast = view.objectives
    assert (available.requests, available.bad, available.fires) == (8_000, 4, False)
    assert available.budget_left == pytest.approx(1 - 0.5 * 80 * 60 / PERIOD_S, abs=1e-4)
    assert (fast.name, fast.limit_ms, fast.budget_left) == ("latency", 20.0, 1.0)


def test_clients_that_leave_page_nobody_and_hide_nothing(world: World) -> None:
    world.promote(1)
    world.minutes(20, 1, requests=50)
    assert world.minutes_until_alert(1, 5, requests=600, gone=600) is None
    view = read_objectives(world.home, "flights", now=world.now)
    assert [(each.requests, each.bad) for each in view.objectives] == [(1_000, 0)] * 2
    assert view.gone[300] == 1.0
    assert view.gone[PERIOD_S] == 3_000 / 4_000
    assert world.minutes_until_alert(1, 60, requests=200, gone=150, bad=1) is not None, "1 of 50 fails"


@pytest.mark.parametrize("traffic", [{"slow": 15}, {"gone": 15, "waited_ms": 21}])
def test_slow_answers_and_clients_that_waited_too_long_burn_the_latency_budget(
    world: World, traffic: dict[str, int]
) -> None:
    world.promote(1)
    world.minutes(20, 1, requests=50)
    assert world.minutes_until_alert(1, 60, requests=50, **traffic) is not None
    assert world.open_keys() == ["flights/objective/latency"]
    assert "take longer than 20 ms" in read_alerts(world.home).open[0].alert.text


def test_after_an_outage_the_page_ends_and_a_ticket_says_what_it_cost(world: World) -> None:
    world.promote(1)
    for _ in range(3):  # a day that was good
        world.minute(1, requests=100)
        world.now += 86_400 / 3
    world.minutes(30, 1, requests=20)
    world.minutes(10, 1, requests=20, bad=20)
    assert world.open_keys() == [KEY]
    world.minutes(45, 1, requests=20)
    assert world.open_keys() == [f"{KEY}/slow-burn"]
    view = read_alerts(world.home, now=world.now)
    assert view.open[0].alert.severity == "ticket"
    assert [each.alert.key for each in view.resolved] == [KEY]


def test_an_outage_that_drives_most_clients_away_is_still_a_page(world: World) -> None:
    """Over six hours hardly anything has failed."""
    world.promote(1)
    world.minutes(5, 1, requests=6_000)
    world.minutes(60, 1, requests=1)
    world.minutes(12, 1, requests=1, bad=1)
    assert KEY in world.open_keys()


def test_the_alert_survives_a_restart_of_the_watcher_as_one(world: World) -> None:
    world.promote(1)
    world.minutes_until_alert(1, 15, bad=50)
    (before,) = read_alerts(world.home, now=world.now).open
    again = World(world.home)
    again.now = world.now
    again.minute(1, bad=50)
    again.close()
    assert [each.id for each in read_alerts(world.home, now=again.now).open] == [before.id]


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_clock_that_jumps_neither_pages_nor_breaks_the_duty(world: World, jump_s: float) -> None:
    world.promote(1)
    for minute in range(30):
        world.minute(1, bad=1 if minute == 5 else 0)
    world.now += jump_s
    world.minutes(10, 1)
    assert world.open_keys() == []
    world.now -= jump_s
    world.minutes(5, 1)
    assert world.open_keys() == []
    assert world.minutes_until_alert(1, 20, bad=50) is not None


def test_a_release_that_burns_is_exchanged_for_the_version_before(strict: World) -> None:
    assert strict.minutes_until_alert(2, 20, bad=30) is not None
    (made,) = read_rollbacks(strict.home, "flights")
    assert (made.from_version, made.to_version, made.by) == (2, 1, "objectives")
    before = Release(model="flights", version=1)
    assert before not in strict.scene.fleet.running(), "it is started again"
    strict.scene.until(Phase.PROMOTED)
    assert before in strict.scene.fleet.running()
    assert strict.scene.router.route("flights").stable == before  # type: ignore[union-attr]
    why = [each for each in decisions(strict.home, "flights") if each.by == "objectives"]
    assert why
    assert "since the release of version 2 too many requests fail" in why[0].reason
    strict.tick()
    assert read_rollbacks(strict.home, "flights")[-1].accepted
    assert "Automatic rollback to version 1" in read_alerts(strict.home).open[0].alert.text


def test_the_version_it_returned_to_is_not_exchanged_again(strict: World) -> None:
    strict.minutes_until_alert(2, 20, bad=30)
    strict.scene.until(Phase.PROMOTED)
    strict.minutes(70, 1, requests=30, bad=10)
    assert len(read_rollbacks(strict.home, "flights")) == 1
    assert model_status(strict.home, "flights").live == 1  # type: ignore[union-attr]
    assert strict.open_keys() == [KEY]
    assert "because of a rollback" in read_alerts(strict.home).open[0].alert.text


def test_a_version_that_a_person_starts_again_is_left_to_the_person(strict: World) -> None:
    strict.minutes_until_alert(2, 20, bad=30)
    strict.scene.until(Phase.PROMOTED)
    strict.minutes(70, 1, requests=30)
    strict.promote(2)
    assert strict.minutes_until_alert(2, 20, bad=30) is not None
    assert len(read_rollbacks(strict.home, "flights")) == 1
    assert model_status(strict.home, "flights").live == 2  # type: ignore[union-attr]


def test_nothing_is_rolled_back_while_a_rollout_decides(strict: World) -> None:
    strict.scene.command("start", 3)
    strict.scene.until(Phase.SHIFTING)
    assert strict.minutes_until_alert(2, 20, bad=30) is not None
    assert read_rollbacks(strict.home, "flights") == ()
    assert "a rollout is running and decides itself" in read_alerts(strict.home).open[0].alert.text


def test_without_permission_there_is_an_alert_alone(world: World) -> None:
    world.promote(1)
    world.minutes(10, 1)
    world.promote(2)
    assert world.minutes_until_alert(2, 20, bad=30) is not None
    assert read_rollbacks(world.home, "flights") == ()
    assert home_inbox(world.home).pending() == []


def test_a_crash_before_the_command_is_submitted_submits_it_once(
    strict: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Mailbox, "submit", crash)
        for _ in range(14):
            try:
                strict.minute(2, bad=30)
            except OSError:
                break
    assert len(read_rollbacks(strict.home, "flights")) == 1
    assert home_inbox(strict.home).pending() == []
    strict.now += 10
    strict.tick()
    strict.tick()
    assert len(home_inbox(strict.home).pending()) == 1
    strict.scene.until(Phase.PROMOTED)
    strict.tick()
    (made,) = read_rollbacks(strict.home, "flights")
    assert made.accepted
    assert model_status(strict.home, "flights").live == 1  # type: ignore[union-attr]


def test_a_rollback_that_was_not_submitted_is_dropped_when_another_version_is_live(
    strict: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Mailbox, "submit", lambda *_: None)  # the disk is slow
        assert strict.minutes_until_alert(2, 20, bad=30) is not None
        (made,) = read_rollbacks(strict.home, "flights")
        assert made.outcome is None
    strict.promote(3)
    strict.tick()
    assert home_inbox(strict.home).pending() == []
    strict.now += 60
    strict.tick()
    (made,) = read_rollbacks(strict.home, "flights")
    assert (made.accepted, made.outcome) == (False, "the controller did not answer")
    assert model_status(strict.home, "flights").live == 3  # type: ignore[union-attr]


def test_a_command_that_no_controller_answers_is_withdrawn_and_may_be_tried_later(strict: World) -> None:
    strict.minutes_until_alert(2, 20, bad=30)
    strict.minutes(3, 2, bad=30)
    (made,) = read_rollbacks(strict.home, "flights")
    assert (made.outcome, made.accepted) == ("the controller did not answer", False)
    assert home_inbox(strict.home).pending() == []
    strict.minutes(12, 2, bad=30)
    assert len(read_rollbacks(strict.home, "flights")) == 2


def test_the_command_shows_budgets_burn_rates_and_rollbacks(
    strict: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strict.minutes_until_alert(2, 20, bad=30, gone=60)
    monkeypatch.setattr("time.time", lambda: strict.now)
    assert serin("slo") == 0
    shown = capsys.readouterr().out
    assert "flights: clients that left before an answer, which counts for no objective: " in shown
    assert "BURNS TOO FAST" in shown
    assert "automatic rollback from version 2 to 1 (not done: no answer yet)" in shown
    assert serin("slo", "flights", "--json") == 0
    (view,) = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in view["objectives"]] == ["availability", "latency"]
    assert serin("slo", "fligths") == 2
    assert "did you mean 'flights'" in capsys.readouterr().err


def test_the_command_says_that_requests_were_counted_and_not_compared_yet(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.minute(1)  # of a model that no controller knows yet
    assert serin("slo", "flights", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert serin("slo", "flights") == 0
    assert capsys.readouterr().out == "no requests were compared with objectives yet\n"


def test_a_version_s_promises_come_from_its_own_spec(home: Path, tmp_path: Path) -> None:
    store = Store.open()
    with store.workspace() as folder:
        spec = small_spec(
            tmp_path / "data",
            rows=10,
            objectives={"latency_ms": 20, "availability": 0.99},
            monitoring={"rollback_on_burn": True},
        )
        write_spec(folder, spec)
        (folder / "manifest.json").write_text("{}")
        store.publish_bundle(NAME, store.reserve_version(NAME), folder)
    promises = Promises()
    found = promises.of(NAME, 1)
    assert (found.objectives.latency_ms, found.objectives.availability, found.rollback) == (20.0, 0.99, True)
    assert promises.limit_ms(NAME, f"{NAME}-v1-baseline") == 20.0
    assert promises.limit_ms(NAME, f"{NAME}-v2") is None
    assert promises.limit_ms(NAME, "unknown") is None


def test_a_server_elsewhere_promises_what_its_spec_says_and_nothing_without_one(
    home: Path, tmp_path: Path
) -> None:
    store, place = Store.open(), Endpoint(http="127.0.0.1:1", grpc="127.0.0.1:1", elsewhere=True)
    silent = register(store, NAME, place)
    assert Promises().of(NAME, silent.version) == Promise()
    spec = tmp_path / "spec.yaml"
    spec.write_text("{objectives: {latency_ms: 20}, monitoring: {rollback_on_burn: true}}")
    found = Promises().of(NAME, register(store, NAME, place, spec=spec).version)
    assert (found.objectives.latency_ms, found.rollback) == (20.0, True)
