"""Prometheus' rules, its dashboard and Alertmanager's route, loaded and fired by the real programs."""

import json
import re
import shutil
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from serin.formats.serving.request import Request
from serin.host.metrics_address import token_file
from serin.host.wiring import request_log
from serin.machine.ports import free_ports
from serin.machine.process import Process
from serin.monitoring.alerts.book import AlertBook
from serin.rollout.decide.state import Phase
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.commands import Command
from serin.rollout.run.status import model_status
from serin.store.store import Store
from serin.watcher.history_duty import HistoryDuty, Promises
from serin.watcher.metrics import MetricsServer
from serin.watcher.objectives_duty import ObjectivesDuty
from tests.e2e.external_scene import asking, scene
from tests.e2e.serving_host import ChildHost, wait_for
from tests.fakes.gpus import write_inventory
from tests.fakes.kserve import serving
from tests.fakes.running_controller import running_controller
from tests.fakes.webhooks import webhook
from tests.kit.waiting import until
from tests.unit.monitoring.request_lines import GOOD, append

FILES = Path(__file__).parents[2] / "deployments" / "prometheus"
PROMETHEUS = shutil.which("prometheus")
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")

needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or ALERTMANAGER is None,
    reason="Prometheus or Alertmanager is not installed; `make system-deps` installs both",
)


@dataclass
class Monitored:
    """`url`: Prometheus' address; `alerts`: Alertmanager's."""

    url: str
    alerts: str

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=20) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None

    def value(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """What Prometheus answers now to an expression."""
        found = self.ask("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def targets(self) -> dict[str, str]:
        return {each["labels"]["job"]: each["health"] for each in self.ask("targets")["activeTargets"]}


@contextmanager
def monitoring(folder: Path, metrics: MetricsServer, receiver: str) -> Iterator[Monitored]:
    """`metrics`: the stack's; `receiver`: the URL that Alertmanager posts to."""
    host = ChildHost()
    port, alerts_port = free_ports(2)
    address = f"127.0.0.1:{metrics.server_address[1]}"
    write_configurations(folder, address, receiver, f"127.0.0.1:{alerts_port}")
    shutil.copy(token_file(metrics.home), folder)
    try:
        host.start(_process("alertmanager", folder, str(ALERTMANAGER), "--config.file=alertmanager.yml",
                            "--storage.path=alerts", "--cluster.listen-address=",
                            f"--web.listen-address=127.0.0.1:{alerts_port}"))  # fmt: skip
        host.start(_process("prometheus", folder, str(PROMETHEUS), "--config.file=prometheus.yml",
                            "--storage.tsdb.path=series", "--enable-feature=native-histograms",
                            f"--web.listen-address=127.0.0.1:{port}"))  # fmt: skip
        made = Monitored(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{alerts_port}")
        for name, url in (("prometheus", made.url), ("alertmanager", made.alerts)):
            wait_for(name, lambda url=url: _ready(url), host, name, within_s=60)  # type: ignore[misc]
        yield made
    finally:
        host.stop_all()


def write_configurations(folder: Path, metrics: str, receiver: str, alertmanager: str) -> None:
    """Writes the checked-in files with other addresses and shorter times, and nothing else changed."""
    shutil.copy(FILES / "rules.yml", folder)
    config = yaml.safe_load((FILES / "prometheus.yml").read_text().replace("127.0.0.1:9464", metrics))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["alerting"]["alertmanagers"] = [{"static_configs": [{"targets": [alertmanager]}]}]
    config["scrape_configs"][2]["http_sd_configs"][0]["refresh_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    route = (FILES / "alertmanager.yml").read_text().replace("http://127.0.0.1:9095", receiver)
    (folder / "alertmanager.yml").write_text(route.replace("group_wait: 10s", "group_wait: 1s"))


def _process(name: str, folder: Path, *command: str) -> Process:
    return Process(
        name=name, command=command, environment={}, folder=folder, log=folder / f"{name}.log", stop_s=10.0
    )


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


pytestmark = needs_prometheus

_FAST_BURN = 'serin_objective_burn_rate{objective="availability", window="1h"}'
_OWN_METRIC = re.compile(r"\bserin_[a-z_]+\b")


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """Prometheus over a gateway with traffic to one external server."""
    folder = tmp_path_factory.mktemp("prometheus")
    with scene() as stack, serving(delay_s=0.002) as server, webhook() as received:
        stack.start(server)
        stack.until(Phase.PROMOTED, version=1, within_s=60)
        metrics = MetricsServer(stack.home, ("127.0.0.1", 0), stack.gateway)
        threading.Thread(target=metrics.serve_forever, daemon=True).start()
        try:
            with asking(stack.port), monitoring(folder, metrics, received.url) as found:
                yield found
        finally:
            metrics.close()


def expressions() -> list[tuple[str, str]]:
    """Every expression of the dashboard, with the panel it is drawn in. `$model` is what Grafana fills in for all."""
    board = json.loads((FILES / "grafana-dashboard.json").read_text())
    drawn = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]
    drawn += [(each["name"], each["expr"]) for each in board["annotations"]["list"]]
    return [(title, expression.replace("$model", ".*")) for title, expression in drawn]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_latency_of_a_release_is_read_from_envoy_s_native_histograms(monitored: Monitored) -> None:
    def found() -> float | None:
        values = monitored.value('serin:latency_ms:p99_5m{release="sentiment-v1"}')
        return values[0][1] if values and values[0][1] > 0 else None

    p99_ms = until(found, "a latency in Prometheus", within_s=60)
    assert 2.0 <= p99_ms < 10_000  # the server takes two milliseconds
    assert monitored.targets() == {"serin": "up", "serin-gateway": "up"}
    (count,) = [value for _, value in monitored.value("serin_model_live_version")]
    assert count == 1


def test_every_rule_is_evaluated_without_an_error(monitored: Monitored) -> None:
    def evaluated() -> list[dict[str, Any]] | None:
        known = [rule for group in monitored.ask("rules")["groups"] for rule in group["rules"]]
        return known if all(rule["health"] != "unknown" for rule in known) else None

    found = until(evaluated, "an evaluation of every rule", within_s=60)
    assert {rule["name"]: rule["health"] for rule in found} == dict.fromkeys(
        (rule.get("record") or rule["alert"] for rule in rules()), "ok"
    )
    assert [rule["name"] for rule in found if rule.get("state") == "firing"] == []


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_expression_of_the_dashboard_can_be_run(
    monitored: Monitored, title: str, expression: str
) -> None:
    assert monitored.ask("query", query=expression)["resultType"] == "vector", title


def test_a_wave_of_errors_reaches_alertmanager_s_receiver_once_and_a_small_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2% of the requests to `flights` fail for an hour and 0.05% of those to `fine`; both promise 99.9%."""
    monkeypatch.setenv("SERIN_INVENTORY", str(write_inventory(tmp_path, ())))
    home, now = tmp_path / "home", time.time()
    for model, one_in in (("flights", 50), ("fine", 2_000)):
        serve_first_version(home, model)
        append(request_log(home), requests(model, one_in, now))
    promises, book = Promises(Store(str(home / "store"))), AlertBook(home)
    history, objectives = HistoryDuty(home, promises), ObjectivesDuty(home, book, promises)
    for duty in (*[history] * 20, objectives):  # a busy machine reads a long log over several ticks
        duty.tick(now)
    history.close()
    objectives.close()
    metrics = MetricsServer(home, ("127.0.0.1", 0))
    threading.Thread(target=metrics.serve_forever, daemon=True).start()
    try:
        with (
            webhook() as received,
            monitoring(tmp_path, metrics, received.url) as found,
        ):
            (message,) = received.wait_for(1, 60.0)
            rounds = scrapes(found)
            until(lambda: scrapes(found) > rounds + 5 or None, "five more evaluations", within_s=60)
            assert received.got == [message]
            burning = {labels["model"]: value for labels, value in found.value(_FAST_BURN)}
    finally:
        metrics.close()
    assert (message["status"], message["receiver"]) == ("firing", "pages")
    (alert,) = message["alerts"]
    assert {"alertname": "SerinErrorBudgetBurns", "model": "flights"}.items() <= alert["labels"].items()
    assert burning["flights"] == pytest.approx(20, rel=0.1)
    assert burning["fine"] == pytest.approx(0.5, rel=0.1)


def serve_first_version(home: Path, model: str) -> None:
    with running_controller(home, model):
        home_rollouts(home).mailbox.submit(Command(kind="start", model=model, version=1, by="test"))
        until(lambda: ((found := model_status(home, model)) and found.live) or None, "live", within_s=30)


def requests(model: str, one_in: int, now: float) -> Iterator[Request]:
    """An hour of ten requests per second of which one in `one_in` fails."""
    for number in range(36_000):
        code = 500 if number % one_in == 0 else 200
        release = f"{model}-v1"
        yield GOOD._replace(t=now - 3_600 + number / 10, model=model, release=release, code=code)


def scrapes(found: Monitored) -> float:
    values = found.value('count_over_time(up{job="serin"}[10m])')
    return values[0][1] if values else 0.0


def test_rules_and_dashboard_name_only_metrics_that_are_served(monitored: Monitored) -> None:
    served = {each["metric"] for each in monitored.ask("targets/metadata", match_target='{job="serin"}')}
    served |= {f"{name}_total" for name in served}
    written = [rule["expr"] for rule in rules()] + [expression for _, expression in expressions()]
    named = {name for expression in written for name in _OWN_METRIC.findall(expression)}
    assert len(named) > 5
    assert named - served == set()
