"""The gateway's certificate and private key, from a team's own files. Checks the pair; never shows the key."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

from serin.errors import TlsUnfit
from serin.machine.durable import file_signature

_HANDSHAKE_S = 2.0


def answers_tls(address: str, port: int) -> bool:
    """Whether a server at this address completes a TLS handshake, with whatever certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host = "localhost" if ip_address(address).is_unspecified else address
    try:
        with (
            socket.create_connection((host, port), timeout=_HANDSHAKE_S) as wire,
            context.wrap_socket(wire, server_hostname=host),
        ):
            return True
    except OSError:
        return False


def tls_pair(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """Combines the two options: TLS with both, none with neither."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise TlsUnfit(certificate=certificate or "", key=key or "", reason="one of the two is not named")
    return TlsFiles(certificate=certificate.absolute(), key=key.absolute())


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Two PEM files: the certificate with its chain, and its private key without a passphrase."""

    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes]:
        """Reads both if they belong together. TlsUnfit says what is wrong, without a byte of the key."""
        try:
            pair = self.certificate.read_bytes(), self.key.read_bytes()
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.certificate, self.key, password=self._no_passphrase
            )
        except ssl.SSLError as error:
            words = {"KEY_VALUES_MISMATCH": "they do not belong together"}
            reason = words.get(
                error.reason, f"not a PEM certificate and its key ({error.reason or 'no PEM'})"
            )
            raise TlsUnfit(certificate=self.certificate, key=self.key, reason=reason) from error
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            raise TlsUnfit(certificate=self.certificate, key=self.key, reason=reason) from error
        return pair

    def signature(self) -> tuple[object, object]:
        """Returns a value that changes with every change of either file, in place or by rename."""
        return file_signature(self.certificate), file_signature(self.key)

    def _no_passphrase(self) -> NoReturn:
        reason = "the key has a passphrase, and nobody is there to type it; write it out without one"
        raise TlsUnfit(certificate=self.certificate, key=self.key, reason=reason)
