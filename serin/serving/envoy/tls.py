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
    """PEM files: the certificate with its chain, and its private key without a passphrase. `ca`: between gateways, the
    authorities that sign the certificates of all hosts; the pair is then for both directions."""

    certificate: Path
    key: Path
    ca: Path | None = None

    def read(self) -> tuple[bytes, ...]:
        """Reads certificate, key and authorities, if they are usable and the first two belong together. TlsUnfit says
        what is wrong, without a byte of the key."""
        try:
            contents = self.certificate.read_bytes(), self.key.read_bytes()
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.certificate, self.key, password=self._no_passphrase
            )
        except ssl.SSLError as error:
            mismatch = error.reason == "KEY_VALUES_MISMATCH"
            unusable = f"not a PEM certificate and its key ({error.reason or 'no PEM'})"
            raise self._unfit("they do not belong together" if mismatch else unusable) from error
        except OSError as error:
            raise self._unfit(f"{error.filename}: {error.strerror}") from error
        return contents if self.ca is None else (*contents, self._read_authorities(self.ca))

    def _read_authorities(self, ca: Path) -> bytes:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
            return ca.read_bytes()
        except ssl.SSLError as error:
            raise self._unfit(f"{ca}: not a PEM certificate of an authority") from error
        except OSError as error:
            raise self._unfit(f"{ca}: {error.strerror}") from error

    def signature(self) -> tuple[object, ...]:
        """Returns a value that changes with every change of a file, in place or by rename."""
        return tuple(file_signature(path) for path in (self.certificate, self.key, self.ca) if path)

    def _no_passphrase(self) -> NoReturn:
        raise self._unfit(
            "the key has a passphrase, and nobody is there to type it; write it out without one"
        )

    def _unfit(self, reason: str) -> TlsUnfit:
        return TlsUnfit(certificate=self.certificate, key=self.key, reason=reason)
