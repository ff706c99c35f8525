"""Several hosts: a worker on this one, which hosts report, and forgetting one that is gone."""

from __future__ import annotations

import os
import signal
from enum import StrEnum
from typing import Annotated

import typer

from serin.commands.arguments import Yes
from serin.commands.output import Json, confirm, show, show_json, show_table
from serin.machine import environment


class Pool(StrEnum):
    CPU = "cpu"
    GPU = "gpu"


def register(app: typer.Typer) -> None:
    app.command()(worker)
    hosts = typer.Typer(help="The hosts that share a store.", no_args_is_help=True)
    hosts.command("list")(list_hosts)
    hosts.command("remove")(remove)
    app.add_typer(hosts, name="hosts")


def worker(
    pool: Annotated[Pool, typer.Argument(help="Whose runs it takes: gpu on hosts with GPUs, else cpu.")],
    limit: Annotated[
        int | None, typer.Option(min=1, help="The most runs at a time. [default: no limit]")
    ] = None,
) -> None:
    """Run stages on this host for the Prefect server at PREFECT_API_URL, until it is stopped.

    SERIN_STORE must name the store that all hosts share. It stays in the foreground, for systemd or a container.
    """
    from serin.cluster.host_worker import worker_command

    command, variables, folder = worker_command(environment.home(), pool.value, limit=limit)
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
