"""The certificates between gateways: from a team's own files, replaced while the gateway runs."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from pathlib import Path

from serin.errors import TlsUnfit
from serin.machine.durable import file_signature, write_whole
from serin.serving.envoy.documents import Documents
from serin.serving.envoy.guard import tls_document, trusted_document
from serin.serving.envoy.peers import CA_NAME, PAIR_NAME, PeerSecrets
from serin.serving.envoy.tls import TlsFiles


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
