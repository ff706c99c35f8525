"""How long a request may take: as long as its server's spec says, with or without another release to turn to."""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor

from serin.formats.serving.request_log import read_requests
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.envoy.routes import Timeouts
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.fakes.kserve import serving

SLOW_S = 1.6  # longer than a second try would wait, whatever it is derived from


def ask(port: int, model: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", b'{"inputs": []}')
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def test_a_slow_server_has_the_whole_time_and_scores_each_request_once() -> None:
    """Also while a candidate that hangs is asked as well: the first answer counts, and no answer in time is lost."""
    alone = Release(model="alone", version=1)
    stable, candidate = (Release(model="split", version=version) for version in (1, 2))
    with (
        serving(delay_s=SLOW_S) as slow,
        serving(delay_s=SLOW_S) as live,
        serving(delay_s=30.0) as hanging,
        lone_gateway() as (gateway, port, host),
    ):
        places = {
            release.name: Endpoint(http=server.address, grpc=server.address)
            for release, server in ((alone, slow), (stable, live), (candidate, hanging))
        }
        routes = [
            ModelRoute(model="alone", epoch=1, stable=alone),
            ModelRoute(model="split", epoch=1, stable=stable, candidate=candidate, candidate_percent=0.01),
        ]
        limits = {
            "alone": Timeouts.from_spec(ServingSpec(request_timeout=30.0)),
            "split": Timeouts.from_spec(ServingSpec(request_timeout=2.8)),
        }
        gateway.apply(routes, places, limits)
        wait_for("the routes", lambda: ask(port, "none") == 404, host, PROCESS_NAME)
        with ThreadPoolExecutor(2) as both:
            assert list(both.map(lambda model: ask(port, model), ("alone", "split"))) == [200, 200]
        wait_for("the log", lambda: len(read_requests(gateway.log).requests) == 2, host, PROCESS_NAME)
        tries = {line.model: line.attempts for line in read_requests(gateway.log).requests}
        assert tries == {"alone": 1, "split": 2}
        assert (slow.asked, live.asked, hanging.asked) == (1, 1, 1)
