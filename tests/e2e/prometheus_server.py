"""A real Prometheus and a real Alertmanager with the checked-in files, on ports of their own and in seconds' steps."""

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from serin.host.metrics_address import token_file
from serin.machine.ports import free_ports
from serin.machine.process import Process
from serin.watcher.metrics import MetricsServer
from tests.e2e.serving_host import ChildHost, wait_for

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
