"""deployments/kubernetes/autoscaling: what Prometheus computes, and what prometheus-adapter offers to autoscalers."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serin.cluster.kubernetes.autoscaler import IN_FLIGHT, PER_SECOND
from serin.serving.envoy.clusters import PROTOCOLS, aggregate_name, cluster_name, every_host_name
from serin.store.artifacts import Release
from tests.unit.test_kubernetes_manifests import ALL

FOLDER = Path(__file__).resolve().parents[3] / "deployments" / "kubernetes" / "autoscaling"
V1, V2 = (Release(model="flights", version=version) for version in (1, 2))
PROMTOOL = shutil.which("promtool")
ACTIVE, SENT = "envoy_cluster_upstream_rq_active", "envoy_cluster_upstream_rq_total"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def test_the_adapter_offers_what_autoscalers_ask_for_and_prometheus_records() -> None:
    (group,) = read("rules.yml")["groups"]
    offered = {rule["name"]["as"]: rule for rule in read("prometheus-adapter.yml")["rules"]}
    assert offered.keys() == {rule["record"] for rule in group["rules"]} == {IN_FLIGHT, PER_SECOND}
    for name, rule in offered.items():
        assert rule["seriesQuery"].partition("{")[0] == name
        resources = {key: each["resource"] for key, each in rule["resources"]["overrides"].items()}
        assert resources == {"namespace": "namespace", "service": "service"}


def test_the_pods_that_are_scraped_have_the_labels_and_ports_of_the_manifests() -> None:
    pods = {
        found["metadata"]["namespace"]: found["spec"]["template"]
        for _, found in ALL
        if found["kind"] == "Deployment" and found["metadata"].get("name") == "gateway"
    }
    for job in read("prometheus.yml")["scrape_configs"]:
        ((space,),) = [each["namespaces"]["names"] for each in job["kubernetes_sd_configs"]]
        pod = pods[space]
        labels = {re.sub(r"[^a-z]", "_", key): value for key, value in pod["metadata"]["labels"].items()}
        ports = {port["name"] for each in pod["spec"]["containers"] for port in each["ports"]}
        for rule in job["relabel_configs"]:
            if rule.get("action") != "keep":
                continue
            (source,) = rule["source_labels"]
            known = {"__meta_kubernetes_pod_label_" + key: {value} for key, value in labels.items()}
            values = {**known, "__meta_kubernetes_pod_container_port_name": ports}[source]
            assert any(re.fullmatch(rule["regex"], value) for value in values), (job["job_name"], source)


def rules_test() -> dict[str, Any]:
    """Two gateways and two replicas of one release, beside another one and clusters that fall back between them."""
    series = []
    for pod, active in (("a", 3), ("b", 4)):
        for protocol in PROTOCOLS:
            labels = f'job="serin-gateway", pod="{pod}", envoy_cluster_name="{cluster_name(V1, protocol)}"'
            series.append({"series": f"{ACTIVE}{{{labels}}}", "values": f"{active}x12"})
            series.append({"series": f"{SENT}{{{labels}}}", "values": f"0+{50 * active}x12"})  # in 5 s
        for name in (aggregate_name(V1, V2, "http"), every_host_name(V1, "http"), "windows"):
            other = f'job="serin-gateway", pod="{pod}", envoy_cluster_name="{name}"'
            series.append({"series": f"{ACTIVE}{{{other}}}", "values": "100x12"})
            series.append({"series": f"{SENT}{{{other}}}", "values": "0+5000x12"})
    v2 = f'job="serin-gateway", pod="a", envoy_cluster_name="{cluster_name(V2, "http")}"'
    series.append({"series": f"{ACTIVE}{{{v2}}}", "values": "1x12"})
    in_flight, per_second = {V1.name: 14, V2.name: 1}, {V1.name: 140}
    return {
        "rule_files": [str(FOLDER / "rules.yml")],
        "evaluation_interval": "5s",
        "tests": [
            {
                "interval": "5s",
                "input_series": series,
                "promql_expr_test": [
                    {"expr": metric, "eval_time": "1m", "exp_samples": [
                        {"labels": f'{metric}{{namespace="serin-releases", service="{name}"}}', "value": value}
                        for name, value in found.items()]}
                    for metric, found in ((IN_FLIGHT, in_flight), (PER_SECOND, per_second))
                ],
            }
        ],
    }  # fmt: skip


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; `make system-deps` installs it")
def test_prometheus_computes_both_metrics_for_each_service(tmp_path: Path) -> None:
    (tmp_path / "test.yml").write_text(yaml.safe_dump(rules_test()))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(tmp_path / "test.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed; `make system-deps` installs it")
def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    """Debian's was built without the discovery of pods: their addresses are given instead."""
    shutil.copy(FOLDER / "rules.yml", tmp_path)
    config = read("prometheus.yml")
    for job in config["scrape_configs"]:
        del job["kubernetes_sd_configs"]
        job["static_configs"] = [{"targets": ["198.18.0.1:9464"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    (tmp_path / "metrics-token").write_text("token")
    done = subprocess.run(
        [str(PROMTOOL), "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
