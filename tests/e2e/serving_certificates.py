"""Certificates for tests: one authority, and as many pairs for this machine as are asked for."""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Pair:
    certificate: bytes  # PEM
    key: bytes

    @property
    def serial(self) -> int:
        return x509.load_pem_x509_certificate(self.certificate).serial_number

    def write(self, certificate: Path, key: Path) -> None:
        """Each by rename, as tools that renew certificates do."""
        for path, data in ((certificate, self.certificate), (key, self.key)):
            scratch = path.with_name(f".{path.name}")
            scratch.write_bytes(data)
            scratch.chmod(0o600)
            scratch.rename(path)


class Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("test authority")
        self.certificate = _pem(_signed(self._name, self._key, self._name, self._key, authority=True))

    def pair(self, *, passphrase: bytes | None = None, addresses: Sequence[str] = ()) -> Pair:
        """`addresses`: of other hosts that may show it too."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(
            _name("localhost"), key, self._name, self._key, authority=False, addresses=addresses
        )
        hidden = (
            serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        )
        data = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)
        return Pair(_pem(certificate), data)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _signed(
    subject: x509.Name,
    key: Key,
    issuer: x509.Name,
    by: Key,
    *,
    authority: bool,
    addresses: Sequence[str] = (),
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    numbers = [x509.IPAddress(ip_address(address)) for address in ("127.0.0.1", *addresses)]
    here = x509.SubjectAlternativeName([x509.DNSName("localhost"), *numbers])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(here, critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(issued_by, critical=False)
        .sign(by, hashes.SHA256())
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
