"""The gateway's configuration: routes, peers, and limits of memory and connections."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serin.errors import GatewayRejected, SpecError, TlsUnfit
from serin.host.wiring import build_gateway
from serin.machine.hardware import memory_bytes
from serin.serving.envoy.clusters import clusters
from serin.serving.envoy.overload import CONNECTION_BUFFER_BYTES, default_connections, default_heap_bytes
from serin.serving.envoy.peers import authority, peer_routes
from serin.serving.envoy.routes import Reachable, Timeouts, route_configuration
from serin.serving.envoy.tls import TlsFiles
from serin.spec.objectives import ObjectivesSpec
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Endpoint, ModelRoute, Release

V1, V2 = Release(model="m", version=1), Release(model="m", version=2)
ENDPOINTS = {
    "m-v1": Endpoint(http="127.0.0.1:1001", grpc="127.0.0.1:1002"),
    "m-v2": Endpoint(http="127.0.0.1:2001", grpc="127.0.0.1:2002"),
}


def table(*routes: ModelRoute, **timeouts: Timeouts) -> list[dict[str, Any]]:
    (host,) = route_configuration(routes, Reachable(endpoints=ENDPOINTS), timeouts, 1 << 20)["virtual_hosts"]
    return list(host["routes"])


def split(percent: float) -> ModelRoute:
    return ModelRoute(model="m", epoch=3, stable=V1, candidate=V2, candidate_percent=percent)


def weights(routes: list[dict[str, Any]], path: str) -> dict[str, int]:
    (found,) = [
        route
        for route in routes
        if route["match"].get("path") == path and "weighted_clusters" in route.get("route", {})
    ]
    return {branch["name"]: branch["weight"] for branch in found["route"]["weighted_clusters"]["clusters"]}


@pytest.mark.parametrize(
    ("percent", "stable", "candidate"),
    [
        (0, 10_000, None),
        (0.01, 9_999, 1),
        (1, 9_900, 100),
        (33.333, 6_667, 3_333),
        (50, 5_000, 5_000),
        (100, None, 10_000),
    ],
)
def test_weights_are_ten_thousandths(percent: float, stable: int | None, candidate: int | None) -> None:
    for path, protocol in (
        ("/v2/models/m/infer", "http"),
        ("/inference.GRPCInferenceService/ModelInfer", "grpc"),
    ):
        alone = f"m-v1_{protocol}"
        first = f"{alone}_then_m-v2" if candidate else alone
        wanted = {first: stable, f"m-v2_{protocol}_then_m-v1": candidate}
        assert weights(table(split(percent)), path) == {
            name: weight for name, weight in wanted.items() if weight
        }


def test_a_candidate_and_the_stable_release_fall_back_on_each_other() -> None:
    found = {cluster["name"]: cluster for cluster in clusters([split(5)], ENDPOINTS)}
    assert set(found) == {
        "m-v1_http", "m-v1_grpc", "m-v2_http", "m-v2_grpc", "m-v2_http_then_m-v1", "m-v2_grpc_then_m-v1",
        "m-v1_http_then_m-v2", "m-v1_grpc_then_m-v2",
    }  # fmt: skip
    orders = {
        name: cluster["cluster_type"]["typed_config"]["clusters"]
        for name, cluster in found.items()
        if "_then_" in name and "grpc" in name
    }
    assert orders == {
        "m-v2_grpc_then_m-v1": ["m-v2_grpc", "m-v1_grpc"],
        "m-v1_grpc_then_m-v2": ["m-v1_grpc", "m-v2_grpc"],
    }


def test_a_candidate_without_weight_keeps_its_ways_back_until_its_route_forgets_it() -> None:
    assert len(clusters([split(0)], ENDPOINTS)) == 8
    assert len(clusters([replace(split(0), candidate=None)], ENDPOINTS)) == 4


def retried(route: dict[str, Any]) -> set[str]:
    return set(route["route"]["retry_policy"]["retry_on"].split(","))


@pytest.mark.parametrize("call", ["infer", "ready", "metadata"])
def test_nobody_answers_for_the_stable_release_but_one_that_has_traffic(call: str) -> None:
    path = "/v2/models/m" + ("" if call == "metadata" else f"/{call}")

    def leads_to(percent: float) -> str:
        (found,) = [route for route in table(split(percent)) if route["match"].get("path") == path]
        action = found["route"]
        return str(action.get("cluster") or action["weighted_clusters"]["clusters"][0]["name"])

    assert leads_to(5) == "m-v1_http_then_m-v2"
    assert leads_to(0) == "m-v1_http", "the candidate was sent back, or was not let in yet"


def test_what_the_stable_release_answers_holds_and_what_a_candidate_fails_does_not() -> None:
    answers = {"5xx", "internal", "resource-exhausted"}
    (shared,) = [route for route in table(split(5)) if route["match"].get("path") == "/v2/models/m/infer"]
    assert retried(shared) >= {"connect-failure", "reset", "unavailable"}
    assert retried(shared).isdisjoint(answers)
    asked = {
        header["header"]["value"]
        for header in shared["route"]["weighted_clusters"]["clusters"][1]["request_headers_to_add"]
        if header["header"]["key"].startswith("x-envoy-retry")
    }
    assert set(",".join(asked).split(",")) == answers
    (alone,) = [route for route in table(split(0)) if route["match"].get("path") == "/v2/models/m/infer"]
    assert retried(alone) >= answers, "it is asked itself once more"


def test_a_call_by_version_never_falls_back() -> None:
    pinned = [
        route
        for route in table(split(5))
        if "/versions/" in route["match"].get("path", "")
        or any(header.get("string_match") for header in route["match"].get("headers", [])[1:])
    ]
    assert len(pinned) == 12
    assert {route["route"]["cluster"] for route in pinned} == {
        "m-v1_http", "m-v1_grpc", "m-v2_http", "m-v2_grpc",
    }  # fmt: skip


@pytest.mark.parametrize(("percent", "answers"), [(0, "m-v1_http"), (50, "m-v1_http"), (100, "m-v1e2_http")])
def test_a_call_by_version_goes_to_the_stable_edition_until_the_other_has_all_traffic(
    percent: float, answers: str
) -> None:
    places = Reachable(
        endpoints={**ENDPOINTS, "m-v1e2": Endpoint(http="127.0.0.1:3001", grpc="127.0.0.1:3002")}
    )
    route = replace(split(percent), candidate=replace(V1, edition=2))
    (host,) = route_configuration([route], places, {}, 1 << 20)["virtual_hosts"]
    found = [
        each["route"]["cluster"]
        for each in host["routes"]
        if each["match"].get("path") == "/v2/models/m/versions/1/infer"
    ]
    assert found == [answers]


def test_a_server_elsewhere_is_asked_without_our_number_and_by_its_own_name() -> None:
    places = {
        name: Endpoint(http="models.example:8000", grpc="[fd00::7]:8001", elsewhere=True)
        for name in ENDPOINTS
    }
    (host,) = route_configuration([split(5)], Reachable(endpoints=places), {}, 1 << 20)["virtual_hosts"]
    routes = {route["match"]["path"]: route for route in host["routes"] if "path" in route["match"]}
    for call in ("/infer", "/ready", ""):
        pinned = routes[f"/v2/models/m/versions/2{call}"]["route"]
        assert (pinned["cluster"], pinned["prefix_rewrite"]) == ("m-v2_http", f"/v2/models/m{call}")
    assert all(route["route"]["auto_host_rewrite"] for path, route in routes.items() if "/models/m" in path)
    refused = [
        route
        for route in host["routes"]
        if {"name": "x-serin-version", "string_match": {"exact": "2"}} in route["match"].get("headers", [])
    ]
    assert [route["direct_response"]["status"] for route in refused] == [404] * 3
    found = {document["name"]: document for document in clusters([split(5)], places)}
    (group,) = found["m-v1_grpc"]["load_assignment"]["endpoints"]
    address = group["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    assert address == {"address": "fd00::7", "port_value": 8001}
    assert (found["m-v1_grpc"]["type"], found["m-v1_http"]["type"]) == ("STATIC", "STRICT_DNS")
    assert found["m-v1_http"]["dns_lookup_family"] == "V4_PREFERRED", "a v6 address may have no listener"


def test_ours_are_asked_by_number_and_under_the_name_that_the_client_used() -> None:
    for route in table(split(5)):
        assert not {"auto_host_rewrite", "prefix_rewrite"} & set(route.get("route", {}))


def test_every_inference_route_carries_model_and_epoch() -> None:
    infer = [
        route
        for route in table(split(5))
        if route["match"].get("path", "").endswith(("/infer", "/ModelInfer"))
    ]
    assert len(infer) == 6  # by weight, and by each version; HTTP and gRPC
    assert {route["name"] for route in infer} == {"m/3"}
    assert [route["metadata"]["filter_metadata"]["serin"] for route in infer] == [
        {"model": "m", "epoch": 3}
    ] * 6


def test_a_version_is_matched_before_the_split() -> None:
    paths = [route["match"].get("path") for route in table(split(5))]
    assert paths.index("/v2/models/m/versions/2/infer") < paths.index("/v2/models/m/infer")


def test_the_last_routes_refuse_everything() -> None:
    for routes in (table(), table(split(5))):
        assert routes[-1]["match"] == {"prefix": "/"}
        assert routes[-1]["direct_response"]["status"] == 404
        open_ended = [route for route in routes if "prefix" in route["match"]]
        assert all("direct_response" in route for route in open_ended)


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (split(101), "101 is not a percentage"),
        (split(-1), "-1 is not a percentage"),
        (split(float("nan")), "nan is not a percentage"),
        (
            ModelRoute(model="m", epoch=1, stable=None, candidate=V2, candidate_percent=5),
            "needs a stable release",
        ),
        (
            ModelRoute(model="m", epoch=1, stable=Release(model="m", version=9)),
            "m-v9 is not one of its running",
        ),
        (ModelRoute(model="n", epoch=1, stable=V1), "m-v1 is not one of its running"),
    ],
)
def test_what_cannot_be_honoured_is_refused(route: ModelRoute, words: str) -> None:
    with pytest.raises(GatewayRejected, match=words):
        table(route)


@pytest.mark.parametrize(
    ("latency_ms", "request_s", "another_s"),
    [
        (50, 5, 1.0),
        (10, 5, 1.0),
        (100, 10, 2.0),
        (500, 5, 2.5),
        (50, 1, 0.5),
        (None, 30, 15.0),
        (50, 1200, 1.0),
    ],
)
def test_one_release_has_the_whole_time_and_another_one_is_asked_before_it_is_over(
    latency_ms: float | None, request_s: float, another_s: float
) -> None:
    timeouts = Timeouts(request_s=request_s)
    if latency_ms is not None:
        timeouts = Timeouts.from_spec(
            ServingSpec(request_timeout=request_s), ObjectivesSpec(latency_ms=latency_ms)
        )
    for percent, asked_after in ((0, None), (5, f"{another_s:.3f}s")):
        models = [entry for entry in table(split(percent), m=timeouts) if "timeout" in entry.get("route", {})]
        assert len(models) == 18, "inference, readiness and metadata: by weight and of each version, twice"
        for action in (entry["route"] for entry in models):
            shared = "_then_" in str(action)
            assert action["timeout"] == f"{request_s:.3f}s"
            assert float(action["idle_timeout"].rstrip("s")) > request_s
            assert action["retry_policy"].get("per_try_timeout") == (asked_after if shared else None)
            assert ("hedge_policy" in action) == (shared and asked_after is not None)


def test_a_baseline_has_its_own_share_falls_back_too_and_is_not_called_by_version() -> None:
    baseline = replace(V1, baseline=True)
    known = ENDPOINTS | {baseline.name: Endpoint(http="127.0.0.1:3001", grpc="127.0.0.1:3002")}
    route = replace(split(10), baseline=baseline, baseline_percent=10.0)
    (host,) = route_configuration([route], Reachable(endpoints=known), {}, 1 << 20)["virtual_hosts"]
    assert weights(host["routes"], "/v2/models/m/infer") == {
        "m-v1_http_then_m-v1-baseline": 8_000, "m-v1-baseline_http_then_m-v1": 1_000, "m-v2_http_then_m-v1": 1_000,
    }  # fmt: skip
    (infer,) = [entry for entry in host["routes"] if entry["match"].get("path") == "/v2/models/m/infer"]
    arms = [
        header["header"]["value"]
        for branch in infer["route"]["weighted_clusters"]["clusters"]
        for header in branch["request_headers_to_add"]
        if header["header"]["key"].startswith("x-serin")
    ]
    assert arms == ["stable", "m-v1", "baseline", "m-v1-baseline", "candidate", "m-v2"]
    pinned = [
        entry for entry in host["routes"] if entry["match"].get("path") == "/v2/models/m/versions/1/infer"
    ]
    assert [entry["route"]["cluster"] for entry in pinned] == ["m-v1_http"]
    assert "m-v1-baseline_grpc_then_m-v1" in {cluster["name"] for cluster in clusters([route], known)}


def test_a_route_says_which_share_of_each_release_is_recorded() -> None:
    recorded = Timeouts(shares={"m-v1": 0.1, "m-v2": 0.5, "n-v1": 1.0})
    infers = {
        entry["match"]["path"]: entry["metadata"]["filter_metadata"]["model_name"]
        for entry in table(split(5), m=recorded)
        if entry["match"].get("path", "").startswith("/v2/models/m") and "metadata" in entry
    }
    shares = {
        path: {key: value for key, value in known.items() if "share" in key} for path, known in infers.items()
    }
    assert shares == {
        "/v2/models/m/infer": {"share": 0.5, "share m-v1": 0.1, "share m-v2": 0.5},
        "/v2/models/m/versions/1/infer": {"share": 0.1, "share m-v1": 0.1},
        "/v2/models/m/versions/2/infer": {"share": 0.5, "share m-v2": 0.5},
    }
    assert "share" not in str(table(split(5), m=Timeouts()))


def test_every_host_says_which_release_answers_there() -> None:
    for document in clusters([split(5)], ENDPOINTS, {"m-v1": ("10.0.0.2:1",)}):
        for place in document.get("load_assignment", {}).get("endpoints", ()):
            for host in place["lb_endpoints"]:
                told = host["metadata"]["filter_metadata"]["serin"]["release"]
                assert document["name"] in (f"{told}_http", f"{told}_grpc", f"{told}_peers")


def test_filters_without_work_are_left_out_until_a_route_needs_them() -> None:
    def left_out(timeouts: dict[str, Timeouts]) -> set[str]:
        (host,) = route_configuration([], Reachable(endpoints={}), timeouts, 1 << 20)["virtual_hosts"]
        return {name for name, config in host["typed_per_filter_config"].items() if config["disabled"]}

    assert left_out({"m": Timeouts()}) == {"bridge", "drain", "model_rates", "windows"}
    assert left_out({"m": Timeouts(), "n": Timeouts(rate_limit="5/s")}) == {"bridge", "drain", "windows"}
    assert left_out({"m": Timeouts(), "n": Timeouts(windows={})}) == {"bridge", "drain", "model_rates"}


SPLIT = ModelRoute(model="m", epoch=3, stable=V1, candidate=V2, candidate_percent=10.0)
HERE = {
    "m-v1": Endpoint(http="127.0.0.1:1001", grpc="127.0.0.1:1002"),
    "m-v2": Endpoint(http="127.0.0.1:2001", grpc="127.0.0.1:2002"),
}
PEERS = {"m-v1": ("10.0.0.2:1", "10.0.0.3:1"), "m-v2": ("10.0.0.2:1", "10.0.0.3:1")}


def found(endpoints: dict[str, Endpoint], peers: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    return {document["name"]: document for document in clusters([SPLIT], endpoints, peers)}


def order(document: dict[str, Any]) -> list[str]:
    return list(document["cluster_type"]["typed_config"]["clusters"])


@pytest.mark.parametrize(
    ("here", "candidate", "stable"),
    [
        (
            HERE,
            ["m-v2_http", "m-v1_http", "m-v2_peers", "m-v1_peers"],
            ["m-v1_http", "m-v1_peers", "m-v2_http", "m-v2_peers"],
        ),
        ({}, ["m-v2_peers", "m-v1_peers"], ["m-v1_peers", "m-v2_peers"]),
        (
            {"m-v1": HERE["m-v1"]},
            ["m-v2_peers", "m-v1_http", "m-v1_peers"],
            ["m-v1_http", "m-v1_peers", "m-v2_peers"],
        ),
    ],
)
def test_a_candidate_is_saved_by_the_live_release_and_that_one_by_its_peers(
    here: dict[str, Endpoint], candidate: list[str], stable: list[str]
) -> None:
    documents = found(here, PEERS)
    assert order(documents["m-v2_http_then_m-v1"]) == candidate
    assert order(documents["m-v1_http_then_m-v2"]) == stable


def test_without_peers_the_documents_are_those_of_one_host() -> None:
    assert clusters([SPLIT], HERE, {}) == clusters([SPLIT], HERE)
    assert order(found(HERE, {})["m-v2_grpc_then_m-v1"]) == ["m-v2_grpc", "m-v1_grpc"]


def test_a_peer_is_named_by_the_release_and_never_all_peers_are_left_out() -> None:
    document = found({}, PEERS)["m-v2_peers"]
    (group,) = document["load_assignment"]["endpoints"]
    assert {each["endpoint"]["hostname"] for each in group["lb_endpoints"]} == {authority("m-v2")}
    assert document["outlier_detection"]["max_ejection_percent"] < 100
    assert "outlier_detection" not in found({}, {"m-v1": ("b:1",), "m-v2": ("b:1",)})["m-v2_peers"]
    assert found({}, {"m-v1": ("b:1",), "m-v2": ("b:1",)})["m-v2_peers"]["type"] == "STRICT_DNS"


def test_requests_are_tried_on_other_hosts_and_a_release_that_leaves_is_not_called_by_version() -> None:
    places = Reachable(endpoints=HERE, peers={"m-v1": ("10.0.0.2:1",)}, leaving={"m-v2"})
    alone = ModelRoute(model="m", epoch=4, stable=V1)
    (host,) = route_configuration([alone], places, {}, 1 << 20)["virtual_hosts"]
    actions = {entry["match"].get("path"): entry["route"] for entry in host["routes"] if "route" in entry}
    assert "/v2/models/m/versions/2/infer" not in actions
    pinned = actions["/v2/models/m/versions/1/infer"]
    assert pinned["cluster"] == "m-v1_http_every_host"
    for action in (pinned, actions["/v2/models/m/infer"]):
        assert action["auto_host_rewrite"]
        assert action["retry_policy"]["num_retries"] == 3
        assert action["retry_policy"]["retry_host_predicate"]


def test_the_peer_port_leads_to_releases_of_this_host_and_nowhere_else() -> None:
    table = peer_routes({"m-v1": ("m-v1_http", "m-v1_grpc")}, {"m-v1": 4.0})
    mine, nobody = table["virtual_hosts"]
    assert mine["domains"] == [authority("m-v1")]
    assert [entry["route"]["cluster"] for entry in mine["routes"]] == ["m-v1_grpc", "m-v1_http"]
    assert {entry["route"]["timeout"] for entry in mine["routes"]} == {"4.000s"}
    assert nobody["domains"] == ["*"]
    assert [entry["direct_response"]["status"] for entry in nobody["routes"]] == [503]


def test_the_certificates_of_the_documentation_are_taken(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "serve-on-several-hosts.md"
    (script,) = re.findall(r"```bash\n(openssl req -x509 .*?)```", page.read_text(), re.DOTALL)
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    ca = tmp_path / "ca.pem"
    files = TlsFiles(certificate=tmp_path / "peer.pem", key=tmp_path / "peer.key", ca=ca)
    assert all(files.read())
    ca.write_text("nothing")
    with pytest.raises(TlsUnfit, match="not a PEM certificate of an authority"):
        files.read()


MB, GB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("memory", "heap", "connections"),
    [(512 * MB, 256 * MB, 1024), (4 * GB, GB, 4096), (24 * GB, 6 * GB, 20_000), (512 * GB, 8 * GB, 20_000)],
)
def test_the_gateway_s_limits_follow_the_machine_s_memory(memory: int, heap: int, connections: int) -> None:
    assert default_heap_bytes(memory) == heap
    assert default_connections(heap) == connections
    assert 2 * connections * CONNECTION_BUFFER_BYTES <= heap, "all of them may be slow at once"


def test_a_container_s_memory_counts_where_it_is_less_than_the_machine_s(tmp_path: Path) -> None:
    machine = memory_bytes(tmp_path)
    assert machine > 256 * MB
    for limit, found in ((str(200 * MB), 200 * MB), ("max", machine), (str(1 << 60), machine)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory_bytes(tmp_path) == found


def test_the_limit_can_be_set_and_what_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_GATEWAY_MEMORY", str(GB))
    document = json.loads(build_gateway(tmp_path).write_bootstrap(1).read_text())
    heap, connections = document["overload_manager"]["resource_monitors"]
    assert heap["typed_config"]["max_heap_size_bytes"] == GB
    assert connections["typed_config"]["max_active_downstream_connections"] == 4096
    for wrong in ("1GB", "1000", "-1"):
        monkeypatch.setenv("SERIN_GATEWAY_MEMORY", wrong)
        with pytest.raises(
            SpecError, match=r"(?s)SERIN_GATEWAY_MEMORY.*is not a number of bytes of at least"
        ):
            build_gateway(tmp_path)
