"""The files that Envoy follows, and pushes that return once Envoy reports them as accepted."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from serin.errors import GatewayRejected
from serin.machine.durable import write_secret
from serin.serving.envoy.admin import LISTENER_SCOPE, Admin
from serin.serving.envoy.api_types import (
    CLUSTER,
    EXTENSION,
    LISTENER,
    RESOURCE,
    ROUTE_CONFIGURATION,
    SECRET,
    Document,
    Kind,
)
from serin.serving.envoy.bootstrap import STAT_PREFIX
from serin.serving.envoy.guard import ISSUERS_NAME, KEYS_NAME, TLS_NAME
from serin.serving.envoy.peers import CA_NAME, PAIR_NAME, PEERS
from serin.serving.envoy.rates import CALLERS_NAME, MODELS_NAME
from serin.serving.envoy.routes import ROUTES_NAME

_FILTERS = "extension_config_discovery.http_filter"
# The type of each document, and the scope of Envoy's statistics about it; empty: Envoy does not say.
_KINDS: dict[Kind, tuple[str, str]] = {
    "listener": (LISTENER, LISTENER_SCOPE),
    "clusters": (CLUSTER, "cluster_manager.cds"),
    "routes": (ROUTE_CONFIGURATION, f"http.{STAT_PREFIX}.rds.{ROUTES_NAME}"),
    "issuers": (EXTENSION, f"{_FILTERS}.{ISSUERS_NAME}"),
    "keys": (EXTENSION, f"{_FILTERS}.{KEYS_NAME}"),
    "caller-rates": (EXTENSION, f"{_FILTERS}.{CALLERS_NAME}"),
    "model-rates": (EXTENSION, f"{_FILTERS}.{MODELS_NAME}"),
    "tls": (SECRET, f"sds.{TLS_NAME}"),
    "refusal-rate": (RESOURCE, ""),
    "peer-routes": (ROUTE_CONFIGURATION, f"http.{PEERS}.rds.{PEERS}"),
    "peer-tls": (SECRET, f"sds.{PAIR_NAME}"),
    "peer-ca": (SECRET, f"sds.{CA_NAME}"),
}
_IN_MEMORY: frozenset[Kind] = frozenset(("clusters", "routes", "model-rates", "peer-routes"))
_TAKE_S = 5.0  # a push that Envoy has not accepted by then is refused; it is repeated once before


class Documents:
    """One file of each kind under `folder`, each in its own folder, whose renames Envoy follows.

    Where traffic goes is under `memory`: a full disk must not keep it from being changed. Those files are made again
    from the journals.
    """

    def __init__(self, folder: Path, memory: Path, admin: Admin) -> None:
        self._folder, self._memory, self._admin = folder, memory, admin

    def file(self, kind: Kind) -> Path:
        return self._folder_of(kind) / f"{kind}.json"

    def make_folders(self) -> None:
        for kind in _KINDS:
            self._folder_of(kind).mkdir(parents=True, exist_ok=True)

    def _folder_of(self, kind: Kind) -> Path:
        return (self._memory if kind in _IN_MEMORY else self._folder) / kind

    def place(self, kind: Kind, documents: list[Document]) -> None:
        """Writes documents for an Envoy that is not running."""
        self._write(kind, _response(kind, documents)[1])

    def present(self, kind: Kind) -> list[Document]:
        try:
            resources = json.loads(self.file(kind).read_bytes())["resources"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return []  # none yet, or damaged: the wanted ones are written again
        return [{key: value for key, value in resource.items() if key != "@type"} for resource in resources]

    def push(self, kind: Kind, documents: list[Document]) -> bool:
        """Pushes documents, and returns whether they are new to Envoy. Raises GatewayRejected when Envoy does not
        accept them; then the earlier ones stay in force."""
        version, text = _response(kind, documents)
        file = self.file(kind)
        before = self._admin.taken(_KINDS[kind][1])
        old = file.read_text(errors="replace") if file.exists() else None
        if before.version == version and old == text:
            return False
        self._write(kind, text)
        again = time.monotonic() + _TAKE_S / 2
        end = again + _TAKE_S / 2
        while (now := self._admin.taken(_KINDS[kind][1])).version != version:
            if now.refused > before.refused or time.monotonic() > end:
                if old is not None:
                    self._write(kind, old)
                late = f"not accepted within {_TAKE_S:g} s"
                reason = "refused, see its log" if now.refused > before.refused else late
                raise GatewayRejected(what=f"new {kind}", reason=f"{reason} ({self._folder / 'envoy.log'})")
            if time.monotonic() > again:
                again = end + 1
                self._write(kind, text)
            time.sleep(0.01)
        return True

    def _write(self, kind: Kind, text: str) -> None:
        """Writes by rename, because Envoy does not see an edit in place, and readable by the owner only: some hold
        secrets."""
        write_secret(self.file(kind), text)


def _response(kind: Kind, documents: list[Document]) -> tuple[str, str]:
    """Returns version and text of a discovery response; equal documents have equal versions."""
    resources = [{"@type": _KINDS[kind][0], **document} for document in documents]
    version = hashlib.sha256(json.dumps(resources, sort_keys=True).encode()).hexdigest()[:16]
    return version, json.dumps({"version_info": version, "resources": resources})
