"""What an agent was started with, kept in its home: its process is restarted without the command line."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Self

from serin.errors import NameInvalid, StackUnusable
from serin.machine.documents import read_json
from serin.machine.durable import write_secret
from serin.machine.ports import is_loopback
from serin.machine.typed_json import Document
from serin.serving.envoy.gateway import PeerPort
from serin.serving.envoy.tls import TlsFiles
from serin.store.objects import checked_key

DESIRED: Final = "desired.json"  # in the agent's folder: the last desired state


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings(Document, form="serin.agent"):
    """`advertise`: the address at which clients and other hosts reach this one. `peer_port` None: other hosts do not
    reach releases of this one. `alone`: no other host shares what is decided, so it is decided here. Of
    `peer_certificate`, `peer_key` and `peer_ca` all are set or none."""

    host: str
    address: str
    port: int
    advertise: str
    peer_port: int | None = None
    peer_certificate: str | None = None
    peer_key: str | None = None
    peer_ca: str | None = None
    gateway_only: bool = False
    alone: bool = False
    tls_certificate: str | None = None
    tls_key: str | None = None
    envoy_file: str | None = None

    @property
    def gateway_address(self) -> str:
        return join_address(self.advertise, self.port)

    @property
    def peer_address(self) -> str | None:
        if self.peer_port is None or self.gateway_only:
            return None
        return join_address(self.advertise, self.peer_port)

    @property
    def peers(self) -> PeerPort | None:
        if self.peer_port is None:
            return None
        return PeerPort(address=self.address, port=self.peer_port, files=self.peer_files)

    @property
    def peer_files(self) -> TlsFiles | None:
        if self.peer_certificate is None or self.peer_key is None or self.peer_ca is None:
            return None
        certificate, key, ca = Path(self.peer_certificate), Path(self.peer_key), Path(self.peer_ca)
        return TlsFiles(certificate=certificate, key=key, ca=ca)

    @property
    def tls(self) -> TlsFiles | None:
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return TlsFiles(certificate=Path(self.tls_certificate), key=Path(self.tls_key))

    def check(self, *, insecure_peers: bool) -> Self:
        """Returns the settings if they can be used. `insecure_peers`: the caller accepts a peer port without TLS."""
        try:
            checked_key(f"hosts/{self.host}")
            if "/" in self.host:
                raise ValueError
        except (NameInvalid, ValueError):
            raise StackUnusable(
                problem=f"{self.host!r} cannot be the name of a host: set SERIN_HOST to one without slashes "
                "and dots at its start"
            ) from None
        files = (self.peer_certificate, self.peer_key, self.peer_ca)
        if any(files) and not all(files):
            raise StackUnusable(
                problem="--peer-cert, --peer-key and --peer-ca belong together; name all three"
            )
        if all(files) and self.peer_port is None:
            raise StackUnusable(problem="--peer-cert needs --peer-port: the port for the other gateways")
        if self.alone and (self.gateway_only or self.peer_port is not None):
            raise StackUnusable(
                problem="--alone is for a gateway without other hosts; leave --gateway-only and --peer-port out"
            )
        if (
            self.peer_port is not None
            and not any(files)
            and not insecure_peers
            and not is_loopback(self.address)
        ):
            raise StackUnusable(
                problem="without certificates anyone who can reach the peer port gets answers from your models: "
                "name --peer-cert, --peer-key and --peer-ca, or --insecure-peers in a network that you trust"
            )
        if self.peer_files:
            self.peer_files.read()
        return self

    def write(self, home: Path) -> None:
        file = _file(home)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_secret(file, json.dumps(self.to_json(), indent=1))

    @classmethod
    def read(cls, home: Path) -> Self | None:
        """Returns the settings of the last agent in `home`; None when there was none. Raises FileBroken when its file
        cannot be read."""

        advice = "move it away and start the agent again with all of its options (`serin agent --help`)"
        return read_json(_file(home), cls.from_json, advice=advice)


def agent_folder(home: Path) -> Path:
    return home / "agent"


def view_file(home: Path) -> Path:
    return agent_folder(home) / "view.json"


def desired_file(home: Path) -> Path:
    return agent_folder(home) / DESIRED


def advertised(address: str) -> str:
    """Returns an address of this host that others can use, for one on which a gateway listens."""
    try:
        if not ip_address(address).is_unspecified:
            return address
    except ValueError:
        return address
    return socket.getfqdn()


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _file(home: Path) -> Path:
    return agent_folder(home) / "settings.json"
