"""Parses the address of a gateway or a server: host:port, http://host:port or https://host."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address. `ca`: a file with the certificates to trust instead of the system's; for https only. `socket`: a unix
    socket, which is used instead of host and port."""

    host: str
    port: int
    tls: bool = False
    ca: Path | None = None
    socket: Path | None = None

    @classmethod
    def parse(cls, url: str, *, ca: Path | str | None = None) -> Address:
        if url.startswith("unix:/"):
            return cls(host="localhost", port=0, socket=Path(url.removeprefix("unix:")))
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a valid address: use http://host:port or https://host:port")
        if parts.path.strip("/") or parts.query or parts.username:
            raise ValueError(f"{url!r}: give only the server, such as http://{parts.hostname}:8080")
        tls = parts.scheme == "https"
        if ca is not None and not tls:
            raise ValueError(f"{url!r} is not https, so a file of trusted certificates has no effect")
        port = parts.port or (443 if tls else 80)
        return cls(host=parts.hostname, port=port, tls=tls, ca=None if ca is None else Path(ca))

    def __str__(self) -> str:
        """Returns host:port (or unix:/path), as the header `host` and gRPC need it."""
        if self.socket is not None:
            return f"unix:{self.socket}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def ssl_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=self.ca) if self.tls else None
