"""Several hosts: what this one is among them (agent, controller, worker), which hosts report, forgetting one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

from serin.commands.arguments import Yes, add_group
from serin.commands.output import Json, confirm, show, show_json, show_table
from serin.machine import environment


def register(app: typer.Typer) -> None:
    for command in (agent, controller, worker):
        app.command()(command)
    add_group(app, "hosts", "The hosts that share a store.", {"list": list_hosts, "remove": remove})


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
_Alone = Annotated[
    bool,
    typer.Option("--alone", help="Decide about rollouts here as well: no other host shares them."),
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
    alone: _Alone = False,
    tls_cert: _TlsCert = None,
    tls_key: _TlsKey = None,
    envoy: _Envoy = None,
) -> None:
    """Serve on this host what a controller decides (`serin controller`), until SIGTERM.

    SERIN_STORE names the store that all hosts share, SERIN_HOST this host. Gateway and releases keep serving while the
    store or the controller is away. A container that serves by itself runs `serin agent --alone`.
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
        alone=alone,
        tls_certificate=str(tls.certificate) if tls else None,
        tls_key=str(tls.key) if tls else None,
        envoy_file=_absolute(envoy),
    ).check(insecure_peers=insecure_peers)
    run_agent(environment.home(), settings, stop_on_signals())


def _absolute(path: Path | None) -> str | None:
    return str(path.absolute()) if path else None


def controller(
    fleet: Annotated[
        Literal["agents", "kubernetes"],
        typer.Option(help="What runs the releases: hosts with `serin agent`, or Kubernetes."),
    ] = "agents",
) -> None:
    """Decide about rollouts on all hosts that share SERIN_STORE. Several may run: one leads, the others take over.

    Runs in the foreground until SIGTERM or SIGINT. `serin up` has its own controller.
    """
    from serin.api.progress import without_progress_lines
    from serin.cluster.controller import run
    from serin.host.standing import log_to_stdout, stop_on_signals

    stop = stop_on_signals()
    with without_progress_lines():
        log_to_stdout()
        run(environment.home(), fleet, stop)


def worker(
    pool: Annotated[
        Literal["cpu", "gpu"], typer.Argument(help="Whose runs it takes: gpu on hosts with GPUs, else cpu.")
    ],
    limit: Annotated[
        int | None, typer.Option(min=1, help="The most runs at a time. [default: no limit]")
    ] = None,
) -> None:
    """Run stages on this host for the Prefect server at PREFECT_API_URL, until it is stopped.

    SERIN_STORE must name the store that all hosts share. It stays in the foreground, for systemd or a container.
    """
    from serin.cluster.host_worker import worker_command

    command, variables, folder = worker_command(environment.home(), pool, limit=limit)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background commands ignore it; Prefect needs it
    os.execve(command[0], command, variables)


def list_hosts(as_json: Json = False) -> None:
    """List the hosts that have reported to the store, with the age of their last report."""
    from serin.cluster.host_list import read_hosts

    found = read_hosts()
    if as_json:
        show_json([entry.to_json() for entry in found])
        return
    rows = [
        (
            entry.host,
            ", ".join(worker.pool for worker in entry.workers) or "-",
            sum(len(worker.runs) for worker in entry.workers),
            len(entry.gpus),
            "-" if entry.agent is None else entry.agent.address,
            f"{'silent for ' if entry.silent else ''}{max(entry.age_s, 0):.0f} s",
        )
        for entry in found
    ]
    empty = "no host has reported; set SERIN_STORE to the store that they share"
    show_table(("host", "workers", "runs", "GPUs", "gateway", "last report"), rows, empty=empty)


def remove(
    host: Annotated[str, typer.Argument(help="The host's name in `serin hosts list`.")],
    yes: Yes = False,
) -> None:
    """Remove a host that is gone for good: its reports are removed, and rollouts no longer wait for it."""
    from serin.cluster.host_list import forget_host

    confirm(f"Forget {host}?", yes=yes)
    forget_host(host)
    show(f"{host} is forgotten; if it still runs, it reports again")
