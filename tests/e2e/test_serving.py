"""Through the gateway: what clients get, what is logged, and what happens when a release dies under them."""

import http.client
import json
import signal
import subprocess
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from serin.errors import GatewayRejected, PredictionFailed, VerificationFailed
from serin.serving.client.client import Protocol, predict
from serin.serving.envoy.access_logs import LOG_FIELDS
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.triton.releases import Releases
from serin.store.artifacts import Endpoint, ModelRoute, Release
from serin.store.store import Store
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_load import loading, outcome
from tests.e2e.serving_stack import NO_SUCH, Stack, good_inputs
from tests.kit.waiting import until
from tests.signals import hit, send_group
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA

PROTOCOLS: list[Protocol] = ["http", "grpc"]


# what clients get


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("batch_rows", [1, 40])
def test_a_prediction_is_what_the_graph_says_in_this_process(
    stack: Stack, protocol: Protocol, batch_rows: int
) -> None:
    columns = bundles.rows(40)
    served = predict(stack.url, MODEL, columns, SCHEMA, protocol, batch_rows=batch_rows)["score"]
    own = bundles.score(stack.store.bundle(MODEL, stack.stable.version).path, columns)
    assert np.abs(served - own).max() == 0, "the same graph on the same runtime: the same bits"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_that_names_a_version_gets_that_release_outside_the_split(
    stack: Stack, protocol: Protocol
) -> None:
    epoch = stack.route(0)
    columns = bundles.rows(5)
    served = predict(stack.url, MODEL, columns, SCHEMA, protocol, stack.candidate.version)["score"]
    own = bundles.score(stack.store.bundle(MODEL, stack.candidate.version).path, columns)
    assert np.array_equal(served, own)
    (line,) = stack.logged(epoch, 1)
    assert (line.arm, line.release) == ("pinned", stack.candidate.name)
    with pytest.raises(PredictionFailed, match=NO_SUCH):
        predict(stack.url, MODEL, columns, SCHEMA, protocol, 99)


def test_readiness_metadata_and_health_are_answered(stack: Stack) -> None:
    place = f"/v2/models/{MODEL}"
    assert stack.ask("GET", f"{place}/ready")[0] == 200
    assert stack.ask("GET", f"{place}/versions/{stack.candidate.version}/ready")[0] == 200
    assert stack.ask("GET", place)[1]["versions"] == [str(stack.stable.version)]
    assert [stack.ask("GET", f"/v2/health/{what}")[0] for what in ("live", "ready")] == [200, 200]
    assert stack.ask("GET", "/v2")[1]["name"] == "serin"
    with tritonclient.grpc.InferenceServerClient(stack.url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
        assert client.is_model_ready(MODEL, str(stack.candidate.version))
        assert client.get_model_metadata(MODEL).versions == [str(stack.stable.version)]


def test_a_body_in_chunks_is_taken(stack: Stack) -> None:
    body = json.dumps({"inputs": good_inputs()}).encode()
    connection = http.client.HTTPConnection(stack.url, timeout=10)
    pieces = iter([body[:40], body[40:]])
    connection.request(
        "POST", f"/v2/models/{MODEL}/infer", pieces, {"transfer-encoding": "chunked"}, encode_chunked=True
    )
    assert connection.getresponse().status == 200
    connection.close()


def test_a_line_of_the_log_holds_exactly_the_promised_fields(stack: Stack) -> None:
    epoch = stack.route(0)
    forged = {
        "x_serin_arm": "candidate",
        "x_serin_release": "other-v9",
        "x_request_id": "mine",
        "x_envoy_retry_on": "x",
    }
    assert stack.ask("POST", f"/v2/models/{MODEL}/infer", {"inputs": good_inputs()}, **forged)[0] == 200
    (line,) = stack.logged(epoch, 1)
    raw = [json.loads(text) for text in stack.gateway.log.read_text().splitlines()][-1]
    assert set(raw) == set(LOG_FIELDS)
    assert (line.model, line.arm, line.release, line.code, line.grpc, line.attempts) == (
        MODEL, "stable", stack.stable.name, 200, None, 1,
    )  # fmt: skip
    assert line.us is not None
    assert 0 < raw["up_us"] <= line.us
    assert line.id != "mine"


# releases that come, share and die


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bytes_that_are_not_utf_8_fail_their_own_request_alone(stack: Stack, protocol: Protocol) -> None:
    stack.route(0)
    bad = {**bundles.rows(3), "carrier": np.array([[b"AA"], [b"\xff\xfe"], [b"UA"]], dtype=object)}
    enough = threading.Event()
    with loading(stack, PROTOCOLS, seconds=20, clients=6, stop=enough.is_set) as results:
        for _ in range(25):
            with pytest.raises(PredictionFailed, match="input 'carrier': row 1 is not UTF-8") as refused:
                predict(stack.url, MODEL, bad, SCHEMA, protocol)
            assert refused.value.fields["status"] in ("400", "StatusCode.INVALID_ARGUMENT")
        enough.set()
    assert sum(result.failed for result in results) == 0
    assert sum(result.requests for result in results) > 25


def test_malformed_requests_get_the_column_at_fault_and_healthy_ones_beside_them_are_answered(
    stack: Stack,
) -> None:
    stack.route(0)
    wrong: dict[str, tuple[str, dict[str, object] | None]] = {
        "type": ("temp", {"datatype": "FP64"}),
        "form": ("temp", {"shape": [1, 3], "data": [0.0, 0.0, 0.0]}),
        "dimensions": ("distance", {"shape": [1]}),
        "rows": ("distance", {"shape": [2, 1], "data": [1, 2]}),
        "missing": ("distance", None),
        "long": ("carrier", {"data": ["x" * 70_000]}),
        "bool": ("night", {"data": [2]}),
    }
    enough = threading.Event()
    with loading(stack, PROTOCOLS, seconds=20, clients=4, stop=enough.is_set) as results:
        for kind, (column, change) in wrong.items():
            inputs = [
                {**given, **(change or {})} if given["name"] == column else given
                for given in good_inputs()
                if given["name"] != column or change is not None
            ]
            for _ in range(5):
                status, answer = stack.ask("POST", f"/v2/models/{MODEL}/infer", {"inputs": inputs})
                assert (kind, status) == (kind, 400)
                assert column in answer["error"], answer
                assert not any(mark in answer["error"] for mark in ("/work", "/tmp", ".py", "Traceback")), (
                    answer
                )
        enough.set()
    print(outcome(results))
    assert sum(result.failed for result in results) == 0


def test_half_of_the_requests_go_to_a_candidate_at_50_percent(stack: Stack) -> None:
    epoch = stack.route(50)
    with loading(stack, PROTOCOLS, seconds=1.5, clients=4) as results:
        pass
    lines = stack.logged(epoch, sum(result.requests for result in results))
    arms = Counter(line.arm for line in lines)
    print(arms, outcome(results))
    assert sum(result.failed for result in results) == 0
    assert {line.release for line in lines if line.arm == "candidate"} == {stack.candidate.name}
    assert abs(arms["candidate"] - len(lines) / 2) < 5 * np.sqrt(len(lines) / 4), "five standard deviations"


@pytest.mark.parametrize("arm", ["candidate", "stable"])
def test_every_request_is_answered_when_one_of_two_releases_is_killed_under_load(
    stack: Stack, arm: str
) -> None:
    victim = stack.candidate if arm == "candidate" else stack.stable
    epoch = stack.route(50)
    killed = threading.Event()

    def after(count: int) -> bool:
        return len(stack.logged(epoch, 0)) >= count

    with loading(stack, PROTOCOLS, seconds=30, clients=6, stop=killed.is_set) as results:
        wait_for("some traffic", lambda: after(200), stack.host)
        pid = stack.host.pid(victim.name)
        assert pid
        hit(pid)
        seen = len(stack.logged(epoch, 0))
        wait_for("more traffic", lambda: after(seen + 400), stack.host)
        killed.set()
    lines = stack.logged(epoch, sum(result.requests for result in results))
    saved = [line for line in lines if line.attempts > 1]
    print(f"{len(lines)} requests, {len(saved)} saved by the other release", outcome(results))
    assert sum(result.failed for result in results) == 0
    assert len(saved) > 100
    assert {(line.arm, line.release) for line in saved} == {(arm, victim.name)}, (
        "what another release saved counts against the one that should have answered"
    )
    large = {**bundles.rows(500), "carrier": np.array([["x" * 8000]] * 500, dtype=object)}
    assert len(predict(stack.url, MODEL, large, SCHEMA, batch_rows=500)["score"]) == 500, (
        "4 MB can be sent again, too"
    )
    for protocol in PROTOCOLS:
        with pytest.raises(PredictionFailed):
            predict(stack.url, MODEL, bundles.rows(1), SCHEMA, protocol, victim.version)
    assert stack.ask("GET", f"/v2/models/{MODEL}/ready")[0] == 200
    assert stack.releases.state(victim) == "dead"
    stack.bring_up(victim)


def _stopped(pid: int) -> bool:
    states = [
        path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) == {"T"}


def test_a_candidate_that_hangs_costs_time_and_not_the_request(stack: Stack) -> None:
    epoch = stack.route(100, request_s=2.0)
    pid = stack.host.pid(stack.candidate.name)
    assert pid
    assert send_group(signal.SIGSTOP, pid)
    try:
        wait_for("all of its threads to stop", lambda: _stopped(pid), stack.host)
        for protocol in PROTOCOLS:
            predict(stack.url, MODEL, bundles.rows(1), SCHEMA, protocol)
    finally:
        send_group(signal.SIGCONT, pid)
    assert [(line.arm, line.attempts) for line in stack.logged(epoch, 2)] == [("candidate", 2)] * 2


def test_a_release_whose_python_died_is_dead_although_triton_calls_it_ready(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serin.serving.triton.probe._SILENT_S", 0.5)  # it hangs each time
    spec = "serving: {backend: onnx_python, request_timeout: 0.5s}\n"
    bundle = bundles.publish(stack.store, bias=0.0, spec=spec)
    other = Release(model=bundle.model, version=bundle.version)
    try:
        stack.bring_up(other)
        server = stack.host.pid(other.name)
        stubs = subprocess.run(["pgrep", "-P", str(server)], capture_output=True, text=True).stdout.split()
        hit(int(stubs[0]))
        wait_for("its death", lambda: stack.releases.state(other) == "dead", stack.host)
        before = stack.releases.endpoint(other)
        stack.bring_up(other)
        assert stack.host.pid(other.name) != server
        assert stack.releases.endpoint(other) == before
    finally:
        stack.host.kill(other.name)
        stack.releases.stop(other)


def test_golden_rows_tell_the_right_release_from_a_wrong_one(stack: Stack) -> None:
    stack.releases.verify(stack.stable)
    stack.releases.verify(stack.candidate)
    other = Store(str(stack.folder / "other"))
    bundles.publish(other, bias=0.3)  # the stable release's name with other answers
    with pytest.raises(VerificationFailed, match="3 of 3 rows differ in 'score'"):
        Releases(stack.folder / "releases", host=stack.host, store=other).verify(stack.stable)


def test_starting_what_runs_changes_nothing(stack: Stack) -> None:
    pid, endpoint = stack.host.pid(stack.stable.name), stack.releases.endpoint(stack.stable)
    stack.releases.start(stack.stable)
    assert (stack.host.pid(stack.stable.name), stack.releases.endpoint(stack.stable)) == (pid, endpoint)
    assert stack.releases.running() == [stack.stable, stack.candidate]


# pushes


def test_what_envoy_refuses_changes_nothing_also_not_for_the_next_envoy(stack: Stack) -> None:
    epoch = stack.route(0)
    wrong = {
        **stack.endpoints(),
        stack.candidate.name: Endpoint(http="127.0.0.1:70000", grpc="127.0.0.1:70001"),
    }
    with pytest.raises(GatewayRejected, match="refused"):
        stack.gateway.apply([ModelRoute(model=MODEL, epoch=99, stable=stack.stable)], wrong)
    predict(stack.url, MODEL, bundles.rows(1), SCHEMA)
    assert len(stack.logged(epoch, 1)) == 1
    envoy = stack.host.pid(PROCESS_NAME)
    assert envoy
    hit(envoy)
    until(lambda: stack.host.state(PROCESS_NAME) == "failed", "Envoy's end")
    assert not stack.gateway.ready()
    with pytest.raises(GatewayRejected, match="does not answer"):
        stack.gateway.apply([], {})
    stack.host.start(stack.gateway.process())
    wait_for("Envoy", stack.gateway.ready, stack.host)
    predict(stack.url, MODEL, bundles.rows(1), SCHEMA)
    assert len(stack.logged(epoch, 2)) == 2


def test_a_release_goes_without_a_failed_request_and_leaves_nothing(stack: Stack) -> None:
    stack.route(50)
    gone = threading.Event()
    record = json.loads((stack.folder / "releases" / stack.candidate.name / "release.json").read_text())
    with loading(stack, PROTOCOLS, seconds=30, clients=3, stop=gone.is_set) as results:
        stack.route(0)
        wait_for("its drain", lambda: stack.gateway.active_requests(stack.candidate) == 0, stack.host)
        only = {stack.stable.name: stack.releases.endpoint(stack.stable)}
        stack.gateway.apply([ModelRoute(model=MODEL, epoch=stack.epoch, stable=stack.stable)], only)
        stack.releases.stop(stack.candidate)
        gone.set()
    print(outcome(results))
    assert sum(result.failed for result in results) == 0
    assert stack.releases.state(stack.candidate) == "absent"
    assert stack.releases.running() == [stack.stable]
    assert not list(Path("/dev/shm").glob(f"{record['place']['shared_memory_prefix']}*"))
    assert not (stack.folder / "releases" / stack.candidate.name).exists()
    with pytest.raises(PredictionFailed, match=NO_SUCH):
        predict(stack.url, MODEL, bundles.rows(1), SCHEMA, version=stack.candidate.version)


def test_a_log_that_grew_is_rotated_and_nothing_is_lost(stack: Stack) -> None:
    only = {stack.stable.name: stack.releases.endpoint(stack.stable)}
    stack.gateway.apply([ModelRoute(model=MODEL, epoch=1000, stable=stack.stable)], only)
    predict(stack.url, MODEL, bundles.rows(1), SCHEMA)
    stack.logged(1000, 1)
    assert not stack.gateway.rotate_logs(1 << 30)
    assert stack.gateway.rotate_logs(10)
    predict(stack.url, MODEL, bundles.rows(1), SCHEMA)
    assert len(stack.logged(1000, 1)) == 1
