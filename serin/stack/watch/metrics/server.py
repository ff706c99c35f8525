"""Serves metrics to Prometheus on loopback: the stack's own, the gateway's, and where each release has its own.

/metrics   the stack's metrics, as OpenMetrics or Prometheus text
/gateway   Envoy's statistics, with native histograms for a scraper that accepts protobuf
/targets   the metrics addresses of the running releases, for Prometheus' HTTP service discovery

A scraper sends the token of the home: any user of the machine can reach the port.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from serin.errors import SerinError, SpecError
from serin.rollout.run.status import status
from serin.serving.envoy.gateway import Gateway
from serin.serving.triton.release_record import read_record
from serin.stack.console.secrets import own_secret
from serin.stack.host.metrics_address import candidates, remove_address, token_file, write_address
from serin.stack.watch.metrics.families import (
    StackCollector,
    alerts,
    build,
    leases,
    release_name,
    releases,
    rollouts,
)
from serin.stack.watch.metrics.watched import captures, drift, objectives, quality
from serin.stack.wiring import build_gateway

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_NEEDS_TOKEN = b"send the token in metrics-token of the stack's home: Authorization: Bearer TOKEN\n"
_SECTIONS = (build, releases, rollouts, objectives, quality, drift, captures, alerts, leases)


def targets(home: Path) -> list[dict[str, Any]]:
    """Returns the running releases with the address of their Triton's metrics, as Prometheus reads them."""
    found = []
    for model in status(home):
        for entry in model.releases:
            name = release_name(model.name, entry)
            record = read_record(home / "releases" / name)
            if record is not None:
                labels = {"model": model.name, "release": name, "arm": entry.arm}
                found.append({"targets": [f"127.0.0.1:{record.place.metrics_port}"], "labels": labels})
    return found


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = _TIMEOUT_S  # of a client that does not read

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        answer = {"/metrics": self._ours, "/gateway": self._gateway, "/targets": self._targets}.get(path)
        if answer is None:
            self._send(404, "text/plain; charset=utf-8", b"there are /metrics, /gateway and /targets\n")
            return
        try:
            if not self._is_allowed():
                self._send(401, "text/plain; charset=utf-8", _NEEDS_TOKEN)
                return
            content_type, body = answer()
        except (OSError, ValueError, SerinError) as error:
            self._send(503, "text/plain; charset=utf-8", f"{error}\n".encode())
            return
        self._send(200, content_type, body)

    def _is_allowed(self) -> bool:
        wanted = f"Bearer {own_secret(token_file(self.server.home))}"
        return hmac.compare_digest(self.headers.get("Authorization", "").encode(), wanted.encode())

    def _ours(self) -> tuple[str, bytes]:
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        return content_type, encode(self.server.registry)

    def _gateway(self) -> tuple[str, bytes]:
        return self.server.gateway.metrics(accept=self.headers.get("Accept", ""))

    def _targets(self) -> tuple[str, bytes]:
        return "application/json", json.dumps(targets(self.server.home)).encode()

    def _send(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        """Writes nothing: a scrape every few seconds would fill the watcher's log."""


class MetricsServer(ThreadingHTTPServer):
    """The HTTP server, in threads of the watcher. A slow scraper delays no duty."""

    daemon_threads = True

    def __init__(self, home: Path, address: tuple[str, int], gateway: Gateway | None = None) -> None:
        self.home, self.gateway = home, gateway or build_gateway(home)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(StackCollector(home, _SECTIONS))
        own_secret(token_file(home))  # there before anybody asks
        super().__init__(address, _Handler)

    @classmethod
    def start(cls, home: Path) -> MetricsServer | None:
        """Starts serving at the first address that is free; None when there is none, which is logged."""
        trouble: list[str] = []
        try:
            addresses = candidates(home)
        except SpecError as error:
            log.warning("no metrics for Prometheus: %s", error)
            remove_address(home)
            return None
        for host, port in addresses:
            try:
                server = cls(home, (host, port))
            except OSError as error:
                trouble.append(f"{host}:{port}: {error}")
                continue
            port = int(server.server_address[1])
            write_address(home, host, port)
            threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
            log.info("metrics for Prometheus on http://%s:%d/metrics", host, port)
            return server
        log.warning("no metrics for Prometheus: cannot listen on %s", "; ".join(trouble))
        remove_address(home)
        return None

    def close(self) -> None:
        self.shutdown()
        self.server_close()
