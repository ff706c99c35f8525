"""TLS of the gateway and between gateways: which files it comes from, new pairs while it runs, and switching it on
without a restart."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from pathlib import Path

from serin.errors import GatewayRejected, TlsUnfit
from serin.machine.durable import write_whole
from serin.serving.envoy.api_types import Document, Kind
from serin.serving.envoy.documents import Documents
from serin.serving.envoy.guard import tls_document, tls_socket, trusted_document
from serin.serving.envoy.peers import CA_NAME, PAIR_NAME, PeerSecrets
from serin.serving.envoy.tls import TlsFiles, answers_tls

_SWITCH_S = 5.0


class _FollowedTls(ABC):
    """TLS from files, whose names are in the record `noted`."""

    kinds: tuple[Kind, ...]

    def __init__(self, noted: Path, documents: Documents) -> None:
        self._noted, self._documents = noted, documents
        self._followed: object = None

    @abstractmethod
    def _made_from(self, files: TlsFiles) -> dict[Kind, Document]:
        """Returns the documents in the order in which they are pushed."""

    def files(self) -> TlsFiles | None:
        """The files that were named last; None without TLS, or when that record is lost."""
        try:
            noted = {name: Path(path) for name, path in json.loads(self._noted.read_bytes()).items()}
            return TlsFiles(**noted)
        except (FileNotFoundError, ValueError, AttributeError, TypeError):
            return None

    def place(self, files: TlsFiles | None) -> None:
        """For an Envoy that is not running; None: without TLS."""
        self._noted.unlink(missing_ok=True)
        for kind in self.kinds:
            self._documents.file(kind).unlink(missing_ok=True)
        if files:
            for kind, document in self._made_from(files).items():
                self._documents.place(kind, [document])
            self._note(files)

    def follow(self) -> None:
        """Uses the files as they are now; open connections continue. TlsUnfit when they do not fit: the old ones stay
        in force.

        Said once for every change: half of a pair may have been replaced, and the other half comes in a moment.
        """
        files = self.files()
        if files and self._followed != (signature := files.signature()):
            try:
                documents = self._made_from(files)
            except TlsUnfit:
                self._followed = signature
                raise
            for kind, document in documents.items():
                self._documents.push(kind, [document])
            self._followed = signature

    def _note(self, files: TlsFiles) -> None:
        named = {"certificate": files.certificate, "key": files.key, "ca": files.ca}
        write_whole(self._noted, json.dumps({name: str(path) for name, path in named.items() if path}))


class GatewayTls(_FollowedTls):
    """TLS of the public port."""

    kinds = ("tls",)

    def _made_from(self, files: TlsFiles) -> dict[Kind, Document]:
        certificate, key = files.read()
        return {"tls": tls_document(certificate, key)}

    @property
    def is_on(self) -> bool:
        return self._noted.exists() or self._documents.file("tls").exists()

    def switch_on(self, files: TlsFiles) -> None:
        """The port of a running gateway speaks TLS alone when this returns, with this certificate and key.

        Requests in flight are answered. Connections without TLS end after their next answer, or when Envoy's time to
        drain is over.
        """
        documents = self._made_from(files)
        (listener,) = self._documents.present("listener")
        (chain,) = listener["filter_chains"]
        if "transport_socket" not in chain:
            self._documents.place("tls", [documents["tls"]])
            chain["transport_socket"] = tls_socket(self._documents.file("tls"))
            try:
                self._documents.push("listener", [listener])
                self._wait_for_handshake(**listener["address"]["socket_address"])
            except GatewayRejected:
                self._documents.file("tls").unlink(missing_ok=True)
                raise
        self._note(files)
        self.follow()

    def _wait_for_handshake(self, address: str, port_value: int) -> None:
        """Envoy reports a listener as taken a moment before its threads use it."""
        end = time.monotonic() + _SWITCH_S
        while not answers_tls(address, port_value):
            if time.monotonic() > end:
                raise GatewayRejected(what="TLS", reason=f"no handshake in {_SWITCH_S:g} s")
            time.sleep(0.02)


class PeerTls(_FollowedTls):
    """TLS between the gateways of several hosts."""

    kinds = ("peer-ca", "peer-tls")

    def _made_from(self, files: TlsFiles) -> dict[Kind, Document]:
        certificate, key, authorities = files.read()
        # The authorities first: a host that has a new certificate trusts the new authority, too.
        return {
            "peer-ca": trusted_document(authorities, CA_NAME),
            "peer-tls": tls_document(certificate, key, PAIR_NAME),
        }

    def secrets(self) -> PeerSecrets | None:
        """Returns the files that Envoy follows; None where gateways use no TLS between them."""
        secrets = PeerSecrets(pair=self._documents.file("peer-tls"), ca=self._documents.file("peer-ca"))
        return secrets if secrets.pair.exists() else None
