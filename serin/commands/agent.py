"""`serin agent`: this host as one of several that serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serin.machine import environment


def register(app: typer.Typer) -> None:
    app.command()(agent)


_Port = Annotated[int, typer.Option(min=1, max=65535, help="The gateway's port for clients.")]
_Address = Annotated[
    str, typer.Option(help="The address on which the gateway listens, for clients and for peers.")
]
_Advertise = Annotated[
    str | None,
    typer.Option(
        help="The address at which others reach this host. [default: --address, or the host's name]"
    ),
]
_PeerPort = Annotated[
    int | None,
    typer.Option(
        min=1, max=65535, help="The port at which gateways of other hosts reach releases of this one."
    ),
]
_PeerCert = Annotated[
    Path | None, typer.Option(help="PEM file of this host's certificate for other gateways.")
]
_PeerKey = Annotated[Path | None, typer.Option(help="PEM file of its private key.")]
_PeerCa = Annotated[
    Path | None, typer.Option(help="PEM file of the authority that signs the certificates of all hosts.")
]
_InsecurePeers = Annotated[
    bool, typer.Option("--insecure-peers", help="Allow a peer port without certificates.")
]
_GatewayOnly = Annotated[
    bool, typer.Option("--gateway-only", help="Run only the gateway; releases run elsewhere.")
]
_TlsCert = Annotated[
    Path | None, typer.Option(help="Use TLS for clients: PEM file of the certificate and its chain.")
]
_TlsKey = Annotated[Path | None, typer.Option(help="PEM file of that certificate's private key.")]
_Envoy = Annotated[
    Path | None, typer.Option(help="YAML file with additional Envoy settings for the gateway.")
]


def agent(
    port: _Port = 8080,
    address: _Address = "127.0.0.1",
    advertise: _Advertise = None,
    peer_port: _PeerPort = None,
    peer_cert: _PeerCert = None,
    peer_key: _PeerKey = None,
    peer_ca: _PeerCa = None,
    insecure_peers: _InsecurePeers = False,
    gateway_only: _GatewayOnly = False,
    tls_cert: _TlsCert = None,
    tls_key: _TlsKey = None,
    envoy: _Envoy = None,
) -> None:
    """Serve on this host what a controller decides (`serin controller`), until SIGTERM.

    SERIN_STORE names the store that all hosts share, SERIN_HOST this host. Gateway and releases keep serving while the
    store or the controller is away.
    """
    from serin.cluster.agent.run import run_agent
    from serin.cluster.agent.settings import AgentSettings, advertised
    from serin.host.standing import stop_on_signals
    from serin.serving.envoy.tls import tls_pair

    tls = tls_pair(tls_cert, tls_key)
    settings = AgentSettings(
        host=environment.host(),
        address=address,
        port=port,
        advertise=advertise or advertised(address),
        peer_port=peer_port,
        peer_certificate=_absolute(peer_cert),
        peer_key=_absolute(peer_key),
        peer_ca=_absolute(peer_ca),
        gateway_only=gateway_only,
        tls_certificate=str(tls.certificate) if tls else None,
        tls_key=str(tls.key) if tls else None,
        envoy_file=_absolute(envoy),
    ).check(insecure_peers=insecure_peers)
    run_agent(environment.home(), settings, stop_on_signals())


def _absolute(path: Path | None) -> str | None:
    return str(path.absolute()) if path else None
