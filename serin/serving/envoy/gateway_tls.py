"""TLS of the gateway and between gateways: which files it comes from, new pairs while it runs, and switching it on
without a restart."""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.errors import GatewayRejected, TlsUnfit
from serin.machine.durable import file_signature, write_whole
from serin.serving.envoy.documents import Documents
from serin.serving.envoy.guard import tls_document, tls_socket, trusted_document
from serin.serving.envoy.peers import CA_NAME, PAIR_NAME, PeerSecrets
from serin.serving.envoy.tls import TlsFiles, answers_tls

_SWITCH_S = 5.0


class GatewayTls:
    """`noted` is the record of the two files that were named."""

    def __init__(self, noted: Path, documents: Documents) -> None:
        self._noted, self._documents = noted, documents
        self._followed: object = None

    @property
    def is_on(self) -> bool:
        return self._noted.exists() or self._documents.file("tls").exists()

    def files(self) -> TlsFiles | None:
        """The files that were named last; None without TLS, or when that record is lost."""
        try:
            noted = json.loads(self._noted.read_bytes())
            return TlsFiles(certificate=Path(noted["certificate"]), key=Path(noted["key"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def place(self, files: TlsFiles | None) -> None:
        """For an Envoy that is not running; None: without TLS."""
        self._noted.unlink(missing_ok=True)
        self._documents.file("tls").unlink(missing_ok=True)
        if files:
            self._documents.place("tls", [tls_document(*files.read())])
            self._note(files)

    def follow(self) -> None:
        """Uses the pair as its files have it. TlsUnfit when it does not fit: the old one stays in force.

        Said once for every change: half of a pair may have been replaced, and the other half comes in a moment.
        """
        files = self.files()
        if files and self._followed != (signature := files.signature()):
            try:
                self._documents.push("tls", [tls_document(*files.read())])
            except TlsUnfit:
                self._followed = signature
                raise
            self._followed = signature

    def switch_on(self, files: TlsFiles) -> None:
        """The port of a running gateway speaks TLS alone when this returns, with this certificate and key.

        Requests in flight are answered. Connections without TLS end after their next answer, or when Envoy's time to
        drain is over.
        """
        pair = files.read()
        (listener,) = self._documents.present("listener")
        (chain,) = listener["filter_chains"]
        if "transport_socket" not in chain:
            self._documents.place("tls", [tls_document(*pair)])
            chain["transport_socket"] = tls_socket(self._documents.file("tls"))
            try:
                self._documents.push("listener", [listener])
                _wait_for_handshake(listener["address"]["socket_address"])
            except GatewayRejected:
                self._documents.file("tls").unlink(missing_ok=True)
                raise
        self._note(files)
        self.follow()

    def _note(self, files: TlsFiles) -> None:
        named = {"certificate": str(files.certificate), "key": str(files.key)}
        write_whole(self._noted, json.dumps(named))


def _wait_for_handshake(place: dict[str, Any]) -> None:
    """Envoy reports a listener as taken a moment before its threads use it."""
    end = time.monotonic() + _SWITCH_S
    while not answers_tls(place["address"], place["port_value"]):
        if time.monotonic() > end:
            raise GatewayRejected(what="TLS", reason=f"no handshake in {_SWITCH_S:g} s")
        time.sleep(0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFiles:
    """`pair`: this host's certificate and key, for both directions. `ca`: PEM file of the authorities that sign the
    certificates of all hosts."""

    pair: TlsFiles
    ca: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Reads certificate, key and authorities. Raises TlsUnfit when one of them is not what it should be."""
        certificate, key = self.pair.read()
        try:
            authorities = self.ca.read_bytes()
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.ca)
        except ssl.SSLError as error:
            reason = f"{self.ca}: not a PEM certificate of an authority"
            raise TlsUnfit(certificate=self.pair.certificate, key=self.pair.key, reason=reason) from error
        except OSError as error:
            reason = f"{self.ca}: {error.strerror}"
            raise TlsUnfit(certificate=self.pair.certificate, key=self.pair.key, reason=reason) from error
        return certificate, key, authorities

    def signature(self) -> tuple[object, object]:
        return self.pair.signature(), file_signature(self.ca)


class PeerTls:
    """`noted` is the record of the files that were named."""

    def __init__(self, noted: Path, documents: Documents) -> None:
        self._noted, self._documents = noted, documents
        self._followed: object = None

    def secrets(self) -> PeerSecrets | None:
        """Returns the files that Envoy follows; None where gateways use no TLS between them."""
        found = PeerSecrets(pair=self._documents.file("peer-tls"), ca=self._documents.file("peer-ca"))
        return found if found.pair.exists() else None

    def place(self, files: PeerFiles | None) -> None:
        """For an Envoy that is not running; None: without TLS."""
        self._noted.unlink(missing_ok=True)
        for kind in ("peer-tls", "peer-ca"):
            self._documents.file(kind).unlink(missing_ok=True)
        if files:
            certificate, key, authorities = files.read()
            self._documents.place("peer-tls", [tls_document(certificate, key, PAIR_NAME)])
            self._documents.place("peer-ca", [trusted_document(authorities, CA_NAME)])
            named = {
                "certificate": str(files.pair.certificate),
                "key": str(files.pair.key),
                "ca": str(files.ca),
            }
            write_whole(self._noted, json.dumps(named))

    def follow(self) -> None:
        """Uses the files as they are now; open connections continue. TlsUnfit, once for every change, when they do not
        fit: the old ones stay in force."""
        files = self._files()
        if files and self._followed != (signature := files.signature()):
            try:
                certificate, key, authorities = files.read()
                # The authorities first: a host that has a new certificate trusts the new authority, too.
                self._documents.push("peer-ca", [trusted_document(authorities, CA_NAME)])
                self._documents.push("peer-tls", [tls_document(certificate, key, PAIR_NAME)])
            except TlsUnfit:
                self._followed = signature
                raise
            self._followed = signature

    def _files(self) -> PeerFiles | None:
        try:
            noted = json.loads(self._noted.read_bytes())
            pair = TlsFiles(certificate=Path(noted["certificate"]), key=Path(noted["key"]))
            return PeerFiles(pair=pair, ca=Path(noted["ca"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
