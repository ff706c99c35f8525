"""Envoy's admin interface over its unix socket: accepted documents, statistics, draining."""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from serin.errors import GatewayRejected
from serin.machine.heartbeat import beat
from serin.machine.unix_http import UnixConnection

LISTENER_SCOPE = "listener_manager.lds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The version of a document that is in force, and how many documents Envoy has refused so far."""

    version: str
    refused: int


class Admin:
    def __init__(self, path: Path, *, timeout_s: float = 5.0) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def ready(self) -> bool:
        """Also the public port is open: Envoy itself is ready without it."""
        try:
            return self._ask("GET", "/ready")[0] == 200 and bool(self.taken(LISTENER_SCOPE).version)
        except GatewayRejected:
            return False

    def taken(self, scope: str) -> Taken:
        """Returns the state of a document, by the scope of its statistics."""
        stats = self.stats(rf"^{re.escape(scope)}\.(version_text|update_rejected|update_failure)$")
        failures = (f"{scope}.update_rejected", f"{scope}.update_failure")
        refused = sum(int(stats.get(name, "0")) for name in failures)
        return Taken(version=stats.get(f"{scope}.version_text", "").strip('"'), refused=refused)

    def stats(self, pattern: str) -> dict[str, str]:
        """Returns every statistic whose name matches; Envoy's patterns are RE2."""
        status, text = self._ask("GET", f"/stats?filter={quote(pattern)}")
        if status != 200:
            raise GatewayRejected(what="a question about its statistics", reason=text.strip())
        pairs = (line.partition(": ") for line in text.splitlines())
        return {name: value for name, _, value in pairs if value}

    def certificate_days(self) -> int | None:
        """Returns the days until the first certificate in force expires; None when there is none."""
        found = json.loads(self._ask("GET", "/certs")[1]).get("certificates", [])
        days = [int(link["days_until_expiration"]) for entry in found for link in entry.get("cert_chain", [])]
        return min(days, default=None)

    def reopen_logs(self) -> None:
        self._ask("POST", "/reopen_logs")

    def drain_listeners(self) -> None:
        """Accepts no new connections; open ones are asked to close after their current request."""
        self._ask("POST", "/healthcheck/fail")  # what lets it say so
        self._ask("POST", "/drain_listeners")

    def metrics(self, accept: str) -> tuple[str, bytes]:
        """Returns the statistics in use for Prometheus as (content type, body).

        A scraper that accepts protobuf gets native histograms, which text cannot express.
        """
        wants_protobuf = "application/vnd.google.protobuf" in accept
        kind, headers = ("prometheusnative", {"Accept": accept}) if wants_protobuf else ("cumulative", {})
        path = f"/stats/prometheus?usedonly&histogram_buckets={kind}"
        status, content_type, body = self._read("GET", path, headers)
        if status != 200:
            raise GatewayRejected(what="a question about its statistics", reason=f"status {status}")
        return content_type, body

    def _ask(self, method: str, path: str) -> tuple[int, str]:
        status, _, body = self._read(method, path, {})
        return status, body.decode()

    def _read(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str, bytes]:
        connection = UnixConnection(self._path, self._timeout_s)
        beat(within_s=self._timeout_s)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type", "text/plain"), answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayRejected(what="a question", reason=f"Envoy does not answer ({error})") from error
        finally:
            connection.close()
