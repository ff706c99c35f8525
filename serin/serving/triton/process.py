"""The Triton process of one release: its own resources, its command line, and the leftovers it may have."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serin.machine import environment
from serin.machine.process import Leftovers, Process
from serin.machine.typed_json import Document
from serin.serving.native.grpc_cancel_guard import cancel_guard_variables
from serin.serving.triton.installation import TritonInstall
from serin.store.artifacts import Endpoint, Release

LOOPBACK = "127.0.0.1"

_PYTHON_BACKEND = "triton_python_backend_stub"[:15]  # as much as the kernel keeps of a name
_SETTLE_S = 10.0  # one that dies sooner did not start: the next try waits longer
_EXIT_S = 3  # for requests in flight; there are none when a release was drained first
_CLOSED_CALLS = "model-repository,model-config,shared-memory,statistics,trace,logging"
# Triton opens these calls to a request that has this header. No request can have it: gRPC refuses a name with a space
# or an upper-case letter, HTTP a line break in a value. So they are closed to everybody, and there is no secret that
# any user of the machine could read from the command line.
_IMPOSSIBLE_HEADER = "No Header=has\nthis"
_SHARED_MEMORY_BYTES = 1 << 20  # at start; it grows. The default of a container's /dev/shm is 64 MB for all


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPorts(Document):
    """The resources of one Triton process: ports on loopback, its shared memory."""

    http_port: int
    grpc_port: int
    metrics_port: int
    shared_memory_prefix: str

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(http=f"{LOOPBACK}:{self.http_port}", grpc=f"{LOOPBACK}:{self.grpc_port}")

    @property
    def ports(self) -> tuple[int, int, int]:
        return self.http_port, self.grpc_port, self.metrics_port


def new_place(release: Release, ports: tuple[int, int, int]) -> TritonPorts:
    return TritonPorts(
        http_port=ports[0],
        grpc_port=ports[1],
        metrics_port=ports[2],
        shared_memory_prefix=f"serin-{release.name}-{secrets.token_hex(6)}-",
    )


def triton_process(
    install: TritonInstall,
    release: Release,
    repository: Path,
    place: TritonPorts,
    log: Path,
    devices: Sequence[str] = (),
    address: str = LOOPBACK,
) -> Process:
    """Returns the process of one release: it loads its repository, and no call changes that.

    It listens on loopback only, unless `address` names the one of a pod, where a network policy protects it.

    It sees only the GPUs that it has memory on; without any, Triton does not use their memory either.
    """
    guard = cancel_guard_variables(install.cancel_guard, place.grpc_port) if install.cancel_guard else {}
    variables = environment.child_environment(
        **guard,
        PATH=f"{install.python_folder}:{environment.search_path()}",
        LD_LIBRARY_PATH=":".join(install.library_path(gpu=bool(devices))) or None,
        CUDA_VISIBLE_DEVICES=",".join(devices),
        PYTHONPATH=None,
        PYTHONHOME=None,
        VIRTUAL_ENV=None,
        PYTHONDONTWRITEBYTECODE="1",  # the repository does not change
        EVENT_EPOLL_USE_CHANGELIST="1",  # fewer calls of epoll_ctl: 2 to 6% more requests/s
    )
    return Process(
        name=release.name,
        command=_command(install, release, repository, place, address),
        environment=variables,
        folder=repository,
        log=log,
        stop_s=_EXIT_S + 4.0,
        settle_s=_SETTLE_S,
        leaves=Leftovers(shared_memory=place.shared_memory_prefix, children=_PYTHON_BACKEND),
    )


def _command(
    install: TritonInstall, release: Release, repository: Path, place: TritonPorts, address: str
) -> tuple[str, ...]:
    closed = f"{_CLOSED_CALLS}:{_IMPOSSIBLE_HEADER}"
    return (
        str(install.server),
        f"--id={release.name}",
        f"--model-repository={repository}",
        f"--backend-directory={install.backends}",
        "--model-control-mode=none",  # the whole repository is loaded at the start, and nothing later
        "--disable-auto-complete-config",
        f"--http-address={address}",
        f"--http-port={place.http_port}",
        f"--grpc-address={address}",
        f"--grpc-port={place.grpc_port}",
        f"--metrics-address={address}",
        f"--metrics-port={place.metrics_port}",
        f"--http-restricted-api={closed}",
        f"--grpc-restricted-protocol={closed}",
        f"--backend-config=python,shm-region-prefix-name={place.shared_memory_prefix}",
        f"--backend-config=python,shm-default-byte-size={_SHARED_MEMORY_BYTES}",
        f"--exit-timeout-secs={_EXIT_S}",
    )


def close_shared_memory(place: TritonPorts, folder: Path = Path("/dev/shm")) -> None:  # noqa: S108 (not a scratch file)
    """Restricts the shared memory between Triton and its Python processes to the owner.

    Triton makes the regions readable by everybody, whatever the umask is.
    """
    for path in folder.iterdir():
        if path.name.startswith(place.shared_memory_prefix):
            with contextlib.suppress(FileNotFoundError):
                path.chmod(0o600)


def reclaim_shared_memory(place: TritonPorts, folder: Path = Path("/dev/shm")) -> int:  # noqa: S108 (not a scratch file)
    """Removes what a dead process left in shared memory; returns the number of regions."""
    left = [path for path in folder.iterdir() if path.name.startswith(place.shared_memory_prefix)]
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)
