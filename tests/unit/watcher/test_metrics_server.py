"""The stack's metrics as Prometheus reads them, over HTTP from a real server and from real files of a stack."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from serin.host.metrics_address import candidates, metrics_url, read_address, token_file, write_address
from serin.host.wiring import request_log
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.book import AlertBook
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.status import model_status
from serin.store.store import Store
from serin.watcher.history_duty import HistoryDuty, Promises
from serin.watcher.metrics import MetricsServer, StackCollector, build
from serin.watcher.objectives_duty import ObjectivesDuty
from tests.fakes.gpus import write_inventory
from tests.fakes.running_controller import running_controller
from tests.kit.waiting import until
from tests.unit.monitoring.request_lines import GOOD, append

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERIN_INVENTORY", str(write_inventory(tmp_path, ())))
    monkeypatch.delenv("SERIN_METRICS", raising=False)
    return tmp_path


@pytest.fixture
def server(home: Path) -> Iterator[MetricsServer]:
    found = MetricsServer.start(home)
    assert found is not None
    yield found
    found.close()


def get(
    server: MetricsServer,
    path: str,
    accept: str = "application/openmetrics-text",
    authorization: str | None = None,
) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.server_address[1]}{path}"
    if authorization is None:
        authorization = f"Bearer {token_file(server.home).read_text().strip()}"
    headers = {"Accept": accept, "Authorization": authorization}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(server: MetricsServer) -> Samples:
    status, text = get(server, "/metrics")
    assert status == 200
    found = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found), "a series may appear once"
    return dict(found)


@pytest.mark.parametrize("path", ["/metrics", "/gateway", "/targets"])
def test_nothing_is_answered_without_the_token(path: str, server: MetricsServer, home: Path) -> None:
    assert token_file(home).stat().st_mode & 0o777 == 0o600
    token = token_file(home).read_text().strip()
    for wrong in ("", token, "Bearer", "Bearer ", f"Bearer {token[:-1]}", f"Basic {token}", "Bearer \u00e9"):
        status, text = get(server, path, authorization=wrong)
        assert status == 401, wrong
        assert "metrics-token" in text
        assert token not in text
    token_file(home).unlink()
    assert get(server, path, authorization=f"Bearer {token}")[0] == 401, "there is another one now"
    assert get(server, path)[0] != 401


def test_a_live_version_and_its_share_of_the_traffic_are_shown(server: MetricsServer, home: Path) -> None:
    with running_controller(home, "flights"):
        home_rollouts(home).mailbox.submit(Command(kind="start", model="flights", version=2, by="test"))
        until(
            lambda: ((found := model_status(home, "flights")) and found.live == 2) or None,
            "live",
            within_s=30,
        )
        found = samples(server)
    assert found["serin_model_live_version", (("model", "flights"),)] == 2
    labels = (("arm", "stable"), ("model", "flights"), ("release", "flights-v2"))
    assert found["serin_release_traffic_share", labels] == 1.0
    failed = {key: value for key, value in found.items() if key[0] == "serin_metrics_section_failed"}
    assert failed
    assert set(failed.values()) == {0.0}


def test_an_open_alert_fires_until_somebody_acknowledges_it(server: MetricsServer, home: Path) -> None:
    book = AlertBook(home)
    alert = Alert(key='flights/drift/"dest"\n', kind="drift", model="flights", release="flights-v1",
                  severity="ticket", title="dest drifted", text="...", since=5.0)  # fmt: skip
    book.fire(alert, 10.0)
    labels = (
        ("alert", alert.key), ("kind", "drift"), ("model", "flights"), ("release", "flights-v1"),
        ("severity", "ticket"),
    )  # fmt: skip
    assert samples(server)["serin_alert_firing", labels] == 1.0
    book.acknowledge(alert.key, by="ann", now=11.0)
    assert samples(server)["serin_alert_firing", labels] == 0.0
    book.resolve(alert.key, 12.0)
    assert ("serin_alert_firing", labels) not in samples(server)


def test_budgets_and_burn_rates_are_shown_for_each_window(server: MetricsServer, home: Path) -> None:
    with running_controller(home, "flights"):
        home_rollouts(home).mailbox.submit(Command(kind="start", model="flights", version=1, by="test"))
        until(lambda: ((found := model_status(home, "flights")) and found.live) or None, "live", within_s=30)
    now = time.time()
    before = [GOOD._replace(t=now - 600)]  # it has been counted for longer than five minutes
    wave = [GOOD._replace(t=now - 60, code=500 if number < 5 else 200) for number in range(100)]
    gone = {"code": 0, "us": None, "flags": "DC", "ms": 1.0, "received_ms": 1.0}
    left = [GOOD._replace(t=now - 60, **gone) for _ in range(300)]
    append(request_log(home), [*before, *wave, *left])
    promises = Promises(Store(str(home / "store")))
    for duty in (HistoryDuty(home, promises), ObjectivesDuty(home, AlertBook(home), promises)):
        duty.tick(now)
        duty.close()
    found = samples(server)
    rates = {dict(labels)["window"]: value for (name, labels), value in found.items()
             if name == "serin_objective_burn_rate" and ("objective", "availability") in labels}  # fmt: skip
    assert set(rates) == {"5m", "30m", "1h", "6h", "3d"}
    assert rates["5m"] == pytest.approx(50)  # 5% of the requests against 0.1%
    budget = ("serin_objective_budget_remaining_ratio", (("model", "flights"), ("objective", "availability")))
    assert found[budget] < 1
    assert found["serin_requests_gone_ratio", (("model", "flights"), ("window", "5m"))] == 0.75


def test_a_section_that_cannot_be_read_takes_no_other_with_it(home: Path) -> None:
    def broken(_: Path) -> Iterator[None]:
        raise OSError("a disk that is gone")
        yield

    names = {
        (sample.name, sample.labels.get("section")): sample.value
        for family in StackCollector(home, (broken, build)).collect()  # type: ignore[arg-type]
        for sample in family.samples
    }
    assert names["serin_metrics_section_failed", "broken"] == 1.0
    assert names["serin_metrics_section_failed", "build"] == 0.0
    assert ("serin_info", None) in names


def test_a_gateway_that_is_down_is_an_error_to_its_scraper_alone(server: MetricsServer) -> None:
    status, text = get(server, "/gateway")
    assert (status, "Envoy does not answer" in text) == (503, True)
    assert json.loads(get(server, "/targets")[1]) == []
    assert get(server, "/elsewhere")[0] == 404


def test_the_address_stays_the_same_over_restarts(home: Path) -> None:
    first = MetricsServer.start(home)
    port = first.server_address[1]
    first.close()
    assert read_address(home) == ("127.0.0.1", port)
    assert candidates(home)[0] == ("127.0.0.1", port)


@pytest.mark.parametrize("bad", ["9464", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_logged_and_stops_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    write_address(home, "127.0.0.1", 9)
    monkeypatch.setenv("SERIN_METRICS", bad)
    assert MetricsServer.start(home) is None
    assert metrics_url(home) is None
    assert "is not host:port" in caplog.text
