"""`serin agent`: this host as one of several that serve."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from serin.machine import environment


def register(app: typer.Typer) -> None:
    app.command()(agent)


def agent(
    port: Annotated[int, typer.Option(min=1, max=65535, help="The gateway's port for clients.")] = 8080,
    address: Annotated[
        str, typer.Option(help="The address on which the gateway listens, for clients and for peers.")
    ] = "127.0.0.1",
    advertise: Annotated[
        str | None,
        typer.Option(
            help="The address at which others reach this host. [default: --address, or the host's name]"
        ),
    ] = None,
    peer_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="The port at which gateways of other hosts reach releases of this one."
        ),
    ] = None,
    peer_cert: Annotated[
        Path | None, typer.Option(help="PEM file of this host's certificate for other gateways.")
    ] = None,
    peer_key: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    peer_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file of the authority that signs the certificates of all hosts."),
    ] = None,
    insecure_peers: Annotated[
        bool, typer.Option("--insecure-peers", help="Allow a peer port without certificates.")
    ] = False,
    gateway_only: Annotated[
        bool, typer.Option("--gateway-only", help="Run only the gateway; releases run elsewhere.")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Use TLS for clients: PEM file of the certificate and its chain.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of that certificate's private key.")] = None,
    envoy: Annotated[
        Path | None, typer.Option(help="YAML file with additional Envoy settings for the gateway.")
    ] = None,
) -> None:
    """Serve on this host what a controller decides (`serin controller`), until SIGTERM.

    SERIN_STORE names the store that all hosts share, SERIN_HOST this host. Gateway and releases keep serving while the
    store or the controller is away.
    """
    from serin.serving.envoy.tls import tls_pair
    from serin.stack.agent.run import run_agent
    from serin.stack.agent.settings import AgentSettings, advertised

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
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    run_agent(environment.home(), settings, stop)


def _absolute(path: Path | None) -> str | None:
    return str(path.absolute()) if path else None
