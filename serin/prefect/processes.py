"""The stack's Prefect processes: the server, its workers, the reconciler."""

from __future__ import annotations

import sys
from pathlib import Path

from serin.host.standing import stack_environment, standing_process
from serin.host.state import POOLS, Stack, stack_name
from serin.host.wiring import PREFECT, RECONCILER, worker_name
from serin.machine import environment
from serin.machine.durable import write_whole
from serin.machine.environment import application_folder
from serin.machine.process import Process
from serin.prefect.login import make_login
from serin.prefect.prepared import is_prepared

WORKER_TYPE = "serin"  # of the work pools and their workers (deployments/workers)
_COMMAND = "serin.prefect.command"
# What Prefect's database keeps. An event has about seven rows, most of all that a run leaves; what reads them looks
# back for minutes. Runs are never removed by default: every scheduled check stays forever.
_KEPT = {
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P1D",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(30 * 86_400),
    # Fewer and larger writes: SQLite has one writer at a time.
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
}
SLURM_TYPE = "serin-slurm"  # of pools whose runs are Slurm jobs
KUBERNETES_TYPE = "serin-kubernetes"  # of pools whose runs are Jobs on Kubernetes


def worker_log(home: Path, pool: str) -> Path:
    return home / "logs" / f"worker-{pool}.log"


def workers_of(home: Path) -> tuple[str, ...]:
    """Returns the names of the stack's workers on the Prefect server, which no other stack has."""
    return tuple(f"serin-{pool}-{stack_name(home)}" for pool in POOLS)


def workers_gate(home: Path) -> Path:
    """Returns the file whose existence lets the stack's workers ask the server for work. It is empty until the whole
    stack is up: processes that wait for runs import what they need after that, because nobody waits for them."""
    return home / "stack" / "workers-may-begin"


def note_up(home: Path) -> None:
    """Notes that the whole stack is up."""
    workers_gate(home).write_text("up\n")


def is_starting(home: Path) -> bool:
    """Returns whether `serin up` is at work in `home`."""
    try:
        return workers_gate(home).stat().st_size == 0
    except OSError:
        return False  # no stack here


def prefect_environment(home: Path, api_url: str, *, own: bool) -> dict[str, str]:
    """Returns the environment for everything that talks to Prefect. A foreign server keeps the caller's credentials."""
    settings: dict[str, str | None] = {
        "PREFECT_API_URL": api_url,
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_WORKER_PREFETCH_SECONDS": "5",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "1.0",  # the default shows a line after two seconds
        "DO_NOT_TRACK": "1",
    }
    if not own:
        settings |= environment.prefect_credentials()
    else:
        settings |= {
            "PREFECT_HOME": str(_private_folder(home)),
            "PREFECT_PROFILE": None,
            "PREFECT_API_AUTH_STRING": make_login(home),
            "PREFECT_API_SSL_CERT_FILE": str(_one_authority(home)),
            # Events bring a worker its runs; a poll finds those whose event was missed. It costs the server
            # more time than a run's other requests.
            "PREFECT_WORKER_QUERY_SECONDS": "10",
            "PREFECT_WORKER_PREFETCH_SECONDS": "10",
            # Server and clients are of one installation; each of Prefect's clients would ask for the server's version.
            "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
            # Of requests that a busy server refuses; pauses double from two seconds on.
            "PREFECT_CLIENT_MAX_RETRIES": "7",
            # Stages exchange data only: a pickled result could run code where it is read.
            "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            # `prefect deployment run --watch` shows these; without them it shows only state changes.
            "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
            "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
            # The default keeps leases in memory; a restart of the server loses them and leaves their slots taken.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        }
    merged = stack_environment(home)
    for name, value in settings.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def _private_folder(home: Path) -> Path:
    """Creates Prefect's folder, private: its database holds parameters of runs, secrets of blocks and their key."""
    folder = home / "prefect"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def _one_authority(home: Path) -> Path:
    """Writes a file with one of the trusted certificates.

    The stack's own server is reached without TLS, but each of Prefect's clients loads all certificates it is given: 45
    ms for the whole list, some ten times in every run.
    """
    file = home / "prefect" / "authority.pem"
    if not file.exists():
        import certifi

        bundle, end = Path(certifi.where()).read_text(encoding="utf-8"), "-----END CERTIFICATE-----"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, bundle[bundle.index("-----BEGIN") : bundle.index(end) + len(end)] + "\n")
    return file


def prefect_server(home: Path, port: int) -> Process:
    api_url = f"http://127.0.0.1:{port}/api"
    server = prefect_environment(home, api_url, own=True)
    # Anyone who may talk to the server may run code here. By default that is everybody on this machine, and any page
    # open in a browser on it.
    server["PREFECT_SERVER_API_AUTH_STRING"] = server["PREFECT_API_AUTH_STRING"]
    server["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] = "true"
    origins = (f"http://127.0.0.1:{port}", f"http://localhost:{port}")
    server["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] = ",".join(origins)
    # On a busy machine, a query that waits is better than one that is refused (503).
    server["PREFECT_SERVER_DATABASE_TIMEOUT"] = server["PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT"] = "60"
    for name, value in _KEPT.items():  # the caller's own choice is respected
        server.setdefault(name, value)
    # The interface's files are copied when they are missing: into the stack's folder, not into the installation.
    server["PREFECT_UI_STATIC_DIRECTORY"] = str(home / "prefect" / "ui")
    if is_prepared(home):  # else the server applies its migrations and registers its block types
        server["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] = "false"
        server["PREFECT_API_BLOCKS_REGISTER_ON_START"] = "false"
        server["PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION"] = "false"
    return Process(
        name=PREFECT,
        command=(sys.executable, "-m", "serin.prefect.server", str(port)),
        environment=server,
        folder=home,
        log=home / "logs" / "prefect.log",
        stop_s=10.0,
    )


def prefect_worker(stack: Stack, pool: str, *, template: Path, kind: str = WORKER_TYPE) -> Process:
    """Returns the worker's process. Its pool is created from `template` if it does not exist."""
    name = workers_of(stack.home)[POOLS.index(pool)]
    return Process(
        name=worker_name(pool),
        command=(
            sys.executable, "-m", _COMMAND, "--after", str(workers_gate(stack.home)), "--no-prompt",
            "worker", "start", "--pool", pool, "--type", kind, "--name", name, "--install-policy", "never",
            "--base-job-template", str(template),
        ),
        environment=prefect_environment(stack.home, stack.prefect_api_url, own=stack.owns_prefect),
        folder=application_folder(),
        log=worker_log(stack.home, pool),
        stop_s=20.0,
    )  # fmt: skip


def reconciler(stack: Stack) -> Process:
    """Returns the reconciler's process with access to Prefect: the stack's login, or the caller's credentials
    elsewhere."""
    prefect = prefect_environment(stack.home, stack.prefect_api_url, own=False)
    return standing_process(
        stack.home, RECONCILER, "serin.prefect.reconcile", None if stack.owns_prefect else prefect
    )
