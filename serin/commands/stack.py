"""The local stack: up, down, status, doctor, env, install; its console's secrets and its backups."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serin.commands.arguments import add_group, open_store
from serin.commands.output import Json, say, show, show_json
from serin.machine import environment
from serin.machine.ports import LOOPBACK

if TYPE_CHECKING:
    from serin.cluster.agent.status import AgentStatus
    from serin.cluster.status import ClusterStatus
    from serin.host.console import Account
    from serin.host.state import Stack
    from serin.stack.status import ServerStatus, Status

_STORE_S = 1.0  # a status shows what it can when the store does not answer


def register(app: typer.Typer) -> None:
    for command in (up, down, status, deploy, doctor, env):
        app.command()(command)
    parts = {"triton": install_triton, "gateway": install_gateway, "kernels": install_kernels}
    add_group(app, "install", "Install parts that pip cannot install.", parts)
    add_group(app, "console", "The console: the stack's web page.", {"secret": secret, "run": run_console})
    copies = {"create": create_copy, "restore": restore_copy}
    add_group(app, "backup", "Copy the state of a stack to a file, and restore it.", copies)


def up(
    address: Annotated[
        str,
        typer.Option(
            help="The IP address on which the gateway listens. Others than loopback need TLS and API keys; other "
            "machines then also reach the console and Prefect's API, with TLS and a login."
        ),
    ] = LOOPBACK,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="The gateway's port. [default: a free one, 8080 first]"),
    ] = None,
    ui_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Prefect's port. [default: a free one, 4200 first]")
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="Use TLS at the gateway, also at one that is up: PEM file of the certificate and its chain."
        ),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's private key.")] = None,
    envoy: Annotated[
        Path | None, typer.Option(help="YAML file with additional Envoy settings for the gateway.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start the local stack: Prefect with two workers, the gateway, the rollout controller."""
    from serin.serving.envoy.tls import tls_pair
    from serin.stack.up import bring_up

    stack = bring_up(
        environment.home(),
        address=address,
        port=port,
        ui_port=ui_port,
        tls=tls_pair(tls_cert, tls_key),
        envoy_file=envoy,
    )
    _show_addresses(stack, as_json=as_json)


def _show_addresses(stack: Stack, *, as_json: bool) -> None:
    from serin.prefect.login import login_file

    addresses = {
        "gateway": stack.gateway_url,
        "prefect": stack.prefect_ui_url,
        "console": stack.console_url,
        "pages": stack.pages_url,
        "prefect_api": stack.prefect_api_url,
        "prefect_login": str(login_file(stack.home)) if stack.owns_prefect else None,
        "home": str(stack.home),
    }
    if as_json:
        show_json(addresses)
        return
    show(f"gateway  {addresses['gateway']}   (models answer at /v2/models/<name>/infer, HTTP and gRPC)")
    login = f"   (its page requires a login: cat {addresses['prefect_login']})" if stack.owns_prefect else ""
    show(f"Prefect  {addresses['prefect']}{login}")
    if stack.console_url:
        show(f"console  {stack.console_url}   (its page requires a login: serin console secret)")
    if stack.pages_url:
        show(f"outside  {stack.pages_url}   (for other machines: the console, and Prefect's API below /api)")
    show(f"state    {addresses['home']}")
    show("next: `serin run SPEC` runs a pipeline, `serin status` shows the stack, `serin down` stops it")


def down() -> None:
    """Stop the local stack. Requests in flight are answered first; nothing is left running."""
    from serin.cluster.agent.run import end_agent
    from serin.host.down import take_down

    if not end_agent(environment.home()):
        take_down(environment.home())
    show("down")


def status(as_json: Json = False) -> None:
    """Show what runs, which releases take traffic, and their latency. Exit code 1 when the stack is not healthy."""
    from serin.errors import StoreError
    from serin.store.open import StoreProbe

    home, probe, hosts = environment.home(), StoreProbe(environment.store_url()), []
    from serin.machine.process import stack_decides  # while the store is asked

    decides = stack_decides(home)
    found: AgentStatus | ClusterStatus | ServerStatus | Status | None = None if decides else _of_agent(home)
    server: ServerStatus | None = None
    try:
        probe.check(_STORE_S)
    except StoreError as error:
        if found is None and not decides:
            raise  # what there is to show is in the store
        from serin.stack.status import read_status

        say(f"hosts are not shown: {error}")
        found = found or read_status(home, ask_store=False)
    else:
        from serin.cluster.host_list import read_hosts_if_reachable
        from serin.cluster.status import read_cluster_status
        from serin.stack.status import read_server_status, read_status

        hosts = read_hosts_if_reachable()
        if not decides and environment.text("PREFECT_API_URL") is not None:
            server = read_server_status(home)
        found = found or (None if decides else read_cluster_status(home)) or server or read_status(home)
    if as_json:
        also = {"prefect": server.to_json()["prefect"]} if server else {}
        entries = [entry.to_json() for entry in hosts]
        show_json({**found.to_json(), **also, **({"hosts": entries} if entries else {})})
    else:
        for line in found.lines():
            show(line)
        for line in server.prefect_lines() if server and server is not found else ():
            show(line)
        for entry in hosts:
            show(f"host {entry}")
    if not found.well:
        raise typer.Exit(1)


def _of_agent(home: Path) -> AgentStatus | None:
    from serin.host.state import read_stack

    if read_stack(home) is None:
        return None
    from serin.cluster.agent.status import read_agent_status

    return read_agent_status(home)


def deploy(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Your own deployments and schedules, as Prefect's prefect.yaml. [default: those of `serin up`]",
            show_default=False,
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            help="A work pool (cpu, gpu) whose runs become Slurm jobs. Repeatable.", show_default=False
        ),
    ] = None,
) -> None:
    """Apply deployments, schedules and automations; those that have not changed stay as they are.

    They go to the stack's Prefect server, or, if no stack is up, to the one that PREFECT_API_URL names.
    """
    from serin.prefect.deploy import deploy

    for name in deploy(environment.home(), file, slurm=slurm or ()):
        show(name)


def doctor(as_json: Json = False) -> None:
    """Check this machine: what is present, what is missing, and what to do. Exit code 1 when something required is
    missing."""
    from serin.stack.doctor import examine

    findings = examine(environment.home())
    if as_json:
        show_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            show(f"{finding.verdict:<8} {finding.what:<13} {finding.found}")
            if finding.advice:
                show(f"{'':<22} {finding.advice}")
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(1)


def env() -> None:
    """Print shell lines that point this shell at the stack: eval "$(serin env)"."""
    from serin.host.state import running_stack
    from serin.prefect.login import login_file

    stack = running_stack(environment.home())
    show(f"export SERIN_HOME={shlex.quote(str(stack.home))}")
    show(f"export PREFECT_API_URL={shlex.quote(stack.prefect_api_url)}")
    if stack.owns_prefect:  # the shell reads the secret itself, so that it is on no screen and in no history
        show(f'export PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(login_file(stack.home)))})"')


def install_triton() -> None:
    """Create Triton's own environment beside this one, and prepare the database of the stack's Prefect server; does
    nothing when both exist."""
    from serin.prefect.template import prepare
    from serin.serving.triton.installation import find_triton, install_triton

    install_triton()
    prepare()
    show(f"Triton: {find_triton().server}")


def install_gateway() -> None:
    """Compile the gateway's request filter, if you use another Triton than that of `serin install triton`."""
    from serin.prefect.template import prepare
    from serin.serving.triton.installation import install_request_filter

    library = install_request_filter()
    prepare()
    show(f"request filter: {library}")


def install_kernels() -> None:
    """Compile most of what datasets need on this machine's GPU, so that the first one waits less."""
    from serin.etl.kernels import compile_kernels

    compile_kernels()
    show("compiled, and kept for later processes")


def secret(
    account: Annotated[
        str | None, typer.Argument(help="viewer or operator. [default: both]", show_default=False)
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace it. Logins with the old one end at once.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the secrets of the console: with that of the viewer one reads, with that of the operator one may do all."""
    from serin.host.console import account_secret, rotate_secret
    from serin.host.state import read_stack

    home = environment.home()
    found = {name: (rotate_secret if rotate else account_secret)(home, name) for name in _accounts(account)}
    if as_json:
        show_json(found)
        return
    stack = read_stack(home)
    if stack is not None and stack.is_alive and stack.console_url:
        say(f"the console is at {stack.console_url}")
    for name, value in found.items():
        show(value if account else f"{name:<9} {value}")


def run_console() -> None:
    """Run the console of hosts that share a store, in the foreground, on any machine that can use the store.

    It listens where the file says that SERIN_CONSOLE names, by default on port 8090 of this machine. The secrets
    that it takes are those of SERIN_HOME (`serin console secret`). On one machine `serin up` runs it.
    """
    os.execv(sys.executable, [sys.executable, "-m", "serin.console.server"])


def _accounts(account: str | None) -> tuple[Account, ...]:
    from serin.errors import NameInvalid
    from serin.host.console import ACCOUNTS

    if account is not None and account not in ACCOUNTS:
        raise NameInvalid(kind="secret", name=account, rule="one of viewer, operator")
    return tuple(name for name in ACCOUNTS if account in (None, name))


def create_copy(
    file: Annotated[Path, typer.Argument(help="The file to write. It must not exist; it will hold secrets.")],
    captures: Annotated[
        bool, typer.Option("--captures/--no-captures", help="Include recorded requests, which may be large.")
    ] = True,
) -> None:
    """Write journals, keys, receivers, the watch's state, Prefect's database and model versions to one file.

    The stack may run. Model versions in an object store stay there. Datasets, trainings and the TLS files are left out.
    """
    from serin.stack.backup.create import create_backup

    path = file.expanduser().absolute()
    manifest = create_backup(environment.home(), open_store(), path, captures=captures)
    show(f"{path}: {len(manifest.files)} files, {path.stat().st_size:,} bytes, readable by you only")
    for model, version in sorted(manifest.live.items()):
        opened = "; its rollout is open" if model in manifest.open_rollouts else ""
        show(f"  {model} version {version} is live{opened}")
    if not manifest.with_store:
        show(f"  model versions are not in it: back up {manifest.store} by its own means")
    if not manifest.owns_prefect:
        show("  the Prefect server is not the stack's: back up its database by its own means")


def restore_copy(
    file: Annotated[Path, typer.Argument(help="A file that `serin backup create` wrote.")],
) -> None:
    """Restore a backup into an empty SERIN_HOME; rollouts that were open are held. Then: serin up."""
    from serin.stack.backup.restore import restore_backup

    home = environment.home()
    manifest = restore_backup(home, open_store(), file.expanduser().absolute())
    show(f"restored into {home}; start it with `serin up`")
    for model in manifest.open_rollouts:
        show(
            f"  the rollout of {model} is held: `serin rollout resume {model}` or `serin rollout abort {model}`"
        )
