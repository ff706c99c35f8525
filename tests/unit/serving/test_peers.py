from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serin.errors import TlsUnfit
from serin.serving.envoy.clusters import clusters
from serin.serving.envoy.peer_tls import PeerFiles
from serin.serving.envoy.peers import authority, peer_routes
from serin.serving.envoy.routes import Reachable, route_configuration
from serin.serving.envoy.tls import TlsFiles
from serin.store.artifacts import Endpoint, ModelRoute, Release

V1, V2 = Release(model="m", version=1), Release(model="m", version=2)
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
    files = TlsFiles(certificate=tmp_path / "peer.pem", key=tmp_path / "peer.key")
    assert all(PeerFiles(pair=files, ca=tmp_path / "ca.pem").read())
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(TlsUnfit, match="not a PEM certificate of an authority"):
        PeerFiles(pair=files, ca=tmp_path / "ca.pem").read()
