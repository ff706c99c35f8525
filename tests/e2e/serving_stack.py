"""Two releases of one model on real Tritons behind a real Envoy, for tests that ask through the lone_gateway."""

import http.client
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.formats.serving.request import Request
from serin.formats.serving.request_log import read_requests
from serin.machine.ports import free_ports
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway, PeerPort
from serin.serving.envoy.pages import Pages
from serin.serving.envoy.routes import Timeouts
from serin.serving.envoy.tls import TlsFiles
from serin.serving.triton.installation import find_request_filter
from serin.serving.triton.releases import Releases
from serin.store.artifacts import Endpoint, ModelRoute, Release
from serin.store.store import Store
from tests.e2e.serving_host import ChildHost, wait_for
from tests.unit.serving import bundles
from tests.unit.serving.bundles import SCHEMA

NO_SUCH = "no such model or version is served here"


@dataclass(slots=True)
class Stack:
    folder: Path
    store: Store
    host: ChildHost
    releases: Releases
    gateway: Gateway
    port: int
    stable: Release
    candidate: Release
    epoch: int = 0

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def endpoints(self) -> dict[str, Endpoint]:
        return {release.name: self.releases.endpoint(release) for release in (self.stable, self.candidate)}

    def route(self, percent: float, *, request_s: float = 40.0) -> int:
        """The candidate gets this share; returns the epoch that says so in the log.

        Another release is asked after half of the time: not because the machine is busy, unless a test is about that.
        """
        self.epoch += 1
        route = ModelRoute(
            model=bundles.MODEL,
            epoch=self.epoch,
            stable=self.stable,
            candidate=self.candidate,
            candidate_percent=percent,
        )
        limits = Timeouts(request_s=request_s, max_text_bytes=65_536)
        self.gateway.apply([route], self.endpoints(), {bundles.MODEL: limits})
        return self.epoch

    def bring_up(self, release: Release) -> None:
        self.releases.start(release)
        wait_for(release.name, lambda: self.releases.state(release) == "ready", self.host, release.name)

    def logged(self, epoch: int, at_least: int) -> list[Request]:
        """The log's lines of an epoch, once there are as many as were asked."""
        found: list[Request] = []

        def complete() -> bool:
            batch = read_requests(self.gateway.log)
            assert not batch.bad_lines
            found[:] = [request for request in batch.requests if request.epoch == epoch]
            return len(found) >= at_least

        wait_for(f"{at_least} lines of epoch {epoch}", complete, self.host)
        return found

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """One request with the path exactly as given; status and JSON (or text) of the answer."""
        connection = http.client.HTTPConnection(self.url, timeout=10)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {k.replace("_", "-"): v for k, v in headers.items()})
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith("{") else text
        finally:
            connection.close()


def start_gateway(
    folder: Path,
    host: ChildHost,
    *,
    tls: TlsFiles | None = None,
    expert: Path | None = None,
    library: Path | None = None,
    peers: PeerPort | None = None,
    pages: Pages | None = None,
    **limits: int,
) -> tuple[Gateway, int]:
    """`library`: the request filter; None: the one that `serin install triton` built."""
    gateway = Gateway(
        folder / "gateway",
        admin=folder / "admin.sock",
        log=folder / "gateway" / "requests.jsonl",
        keys=folder / "keys.json",
        **limits,
    )
    (port,) = free_ports(1)
    gateway.write_bootstrap(
        port, tls=tls, expert=expert, request_filter=library or built_filter(), peers=peers, pages=pages
    )
    host.start(gateway.process())
    wait_for("Envoy", gateway.ready, host)
    return gateway, port


def built_filter() -> Path:
    found = find_request_filter()
    assert found is not None, (
        "the gateway's request filter was not built from these sources: serin install triton"
    )
    return found


@contextmanager
def lone_gateway(place: Path | None = None, **settings: Any) -> Iterator[tuple[Gateway, int, ChildHost]]:
    """Envoy alone, for tests that put servers of their own behind it. `place`: where its files are; one in memory lets
    it record requests."""
    host, folder = ChildHost(), Path(tempfile.mkdtemp(prefix="serin-e2e-", dir=place))
    try:
        gateway, port = start_gateway(folder, host, **settings)
        yield gateway, port, host
    finally:
        host.kill(PROCESS_NAME)
        shutil.rmtree(folder)


@contextmanager
def running_stack(tls: TlsFiles | None = None, backend: str = "auto") -> Iterator[Stack]:
    host = ChildHost()
    folder = Path(tempfile.mkdtemp(prefix="serin-e2e-"))  # short: it holds unix sockets
    store = Store(str(folder / "store"))
    releases = Releases(folder / "releases", host=host, store=store)
    try:
        spec = f"objectives: {{latency_ms: 50}}\nserving: {{request_timeout: 4s, backend: {backend}}}\n"
        versions = [bundles.publish(store, bias=bias, spec=spec).version for bias in (-1.0, 1.5)]
        stable, candidate = (Release(model=bundles.MODEL, version=version) for version in versions)
        for release in (stable, candidate):
            releases.start(release)
        gateway, port = start_gateway(folder, host, tls=tls)
        stack = Stack(folder, store, host, releases, gateway, port, stable, candidate)
        for release in (stable, candidate):
            stack.bring_up(release)
        stack.route(0)
        yield stack
    finally:
        end_all(host, releases, folder)


def end_all(host: ChildHost, releases: Releases, folder: Path) -> None:
    """Kills every process and removes the folder."""
    host.kill(PROCESS_NAME)
    for release in releases.running():
        host.kill(release.name)
        releases.stop(release)
    host.stop_all()
    shutil.rmtree(folder, ignore_errors=True)


def good_inputs() -> list[dict[str, Any]]:
    values = {"carrier": "AA", "temp": 0.5, "distance": 1, "night": 0}
    return [
        {"name": column.name, "datatype": column.dtype, "shape": [1, 1], "data": [values[column.name]]}
        for column in SCHEMA.inputs
    ]
