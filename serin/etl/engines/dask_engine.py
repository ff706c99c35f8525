"""The engine of a Dask cluster: a local one that is started here, or one whose scheduler the user names.

Workers and this process must see the same file system: the store, and the tables when they are local files. A worker
that dies takes nothing with it that cannot be made again: what tasks share is in files, not in workers.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import distributed
from distributed.client import FutureCancelledError
from distributed.comm.core import CommClosedError
from distributed.scheduler import KilledWorker

from serin.errors import ClusterNotUp, EngineFailed, SpecError
from serin.etl.engines.cuda_cluster import gpu_cluster
from serin.etl.engines.device import free_gpu_bytes, take_rescues, usable_gpus
from serin.etl.engines.engine import Arguments, Engine, Held, call
from serin.etl.engines.spill import loaded, spill
from serin.machine import environment
from serin.machine.hardware import core_count
from serin.machine.packages import entered
from serin.spec.load import checked_spec
from serin.spec.tables import located
from serin.spec.yaml_file import read_mapping
from serin.store.packages import IMPORTS

_Client: Any = distributed.Client
_Security: Any = distributed.Security
_as_completed: Any = distributed.as_completed
_CERTIFICATES = (
    "tls_ca_file",
    *(f"tls_{role}_{part}" for role in ("client", "scheduler", "worker") for part in ("cert", "key")),
)
CONNECT_S = 10.0
_SHARED_FOLDER = "set SERIN_SCRATCH (or SERIN_STORE) to a folder that all hosts mount at the same path"
_FOR_SCHEDULERS = (
    "put tables into the store (`serin tables push FOLDER`) and install operators on the workers"
)
_FAN_IN = 4  # partial results merged at once: they are all in one worker then
_WORKER_SHARE = 0.15  # of what a worker has free: Dask stops giving it work at 0.8, and ends it at 0.95


class WorkersLost(MemoryError):
    """A piece ended every worker it was given to: it is too large for them."""


@contextmanager
def cuda_cluster(workers: int, scratch: Path) -> Iterator[Any]:
    """A client of one process per GPU of this machine, each with its own memory pool for cupy and cuDF. It accepts only
    this client, as `local_cluster` does."""
    security = _Security.temporary()
    certificates = {name: getattr(security, name) for name in _CERTIFICATES}
    with (
        gpu_cluster(workers, scratch / "gpu-cluster", certificates=certificates) as address,
        _Client(address, security=security, set_as_default=False, timeout=CONNECT_S) as client,
    ):
        try:
            client.wait_for_workers(workers, timeout=CONNECT_S)
        except TimeoutError as error:
            raise ClusterNotUp(reason=str(error)) from error
        yield client


@contextmanager
def connect(address: str, scratch: Path) -> Iterator[Any]:
    """A client of the scheduler at `address`, all of whose workers see the folder `scratch`."""
    _refuse_travelled(address)
    try:
        client = _Client(address, set_as_default=False, timeout=CONNECT_S)
    except OSError as error:
        raise EngineFailed(engine=address, reason=f"no scheduler answers ({error})") from error
    with client:
        _refuse_blind_workers(client, address, scratch)
        _share_environment(client, address)
        yield client


def _refuse_travelled(address: str) -> None:
    """SpecError for tables and operators of the package that this process works in: workers that somebody else has
    started do not see its files, and another run may have given them other modules of these names."""
    if environment.text("SERIN_PACKAGE") is None:
        return
    spec, found = checked_spec(read_mapping(Path("spec.yaml")), where="spec"), list[str]()

    def note(path: str) -> str:
        if "://" not in path and not Path(path).is_absolute():
            found.append(path)
        return path

    for table in spec.data.tables.values():
        located(table, note)
    for path in (step.import_path for feature in spec.features for step in feature.steps):
        if path is not None and _is_packed(path.partition(":")[0]):
            found.append(path)
    if found:
        reason = f"{', '.join(found)} travelled with the run, and the workers of {address} do not see it"
        advice = f"{_FOR_SCHEDULERS}, or use etl.engine: auto"
        raise SpecError(where=spec.name, problems=[("etl.engine", f"{reason}; {advice}")])


def _is_packed(module: str) -> bool:
    """Whether the package in the working folder has this module."""
    name = module.replace(".", "/")
    places = [Path(folder, name) for folder in ("", IMPORTS)]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)


def _share_environment(client: Any, address: str) -> None:
    """Workers that somebody else has started import a user's operators as this process does."""
    now = entered()
    if now is None or now.folder is None:
        return
    seen = client.run(_import_from, str(now.folder))
    if blind := sorted(worker for worker, sees in seen.items() if not sees):
        reason = f"these workers do not see the environment {now.folder}: {', '.join(blind)}"
        raise EngineFailed(
            engine=address, reason=f"{reason}; set SERIN_HOME to a folder that all hosts mount"
        )


def _import_from(folder: str) -> bool:
    environment.import_from(Path(folder))
    return Path(folder).is_dir()


def _refuse_blind_workers(client: Any, address: str, scratch: Path) -> None:
    """Workers may be on other hosts: what tasks share is in files, which all of them must see."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_S)
    except TimeoutError as error:
        raise EngineFailed(engine=address, reason="the scheduler has no workers") from error
    token, file = uuid.uuid4().hex, scratch / "seen-by-all"
    file.write_text(token)
    seen = client.run(_read, str(file), on_error="return")
    blind = sorted(worker for worker, found in seen.items() if found != token)
    if blind:
        reason = f"these workers do not see {scratch}: {', '.join(blind)}; {_SHARED_FOLDER}"
        raise EngineFailed(engine=address, reason=reason)


def _read(path: str) -> str:
    return Path(path).read_text()


def every_worker_has_a_gpu(client: Any) -> bool:
    """One each, as dask-cuda gives them."""
    found = client.run(usable_gpus).values()
    return bool(found) and all(gpus.count == 1 for gpus in found)


def memory_bytes(client: Any) -> int:
    """What all workers together may use."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return sum(worker["memory_limit"] or 2**62 for worker in workers)


class DaskEngine(Engine):
    """`keep`: what is held stays in the workers' memory; else it goes to files in `scratch`."""

    def __init__(self, client: Any, *, scratch: Path, keep: bool = True, gpu: bool = False) -> None:
        self._client = client
        client.forward_logging(
            "distributed", level=logging.WARNING
        )  # reported here, not in a file on a worker's machine
        super().__init__()
        self._scratch = str(scratch)
        self._in_memory = keep
        self.gpu = gpu
        self.gpus = len(client.nthreads()) if gpu else 0
        self.workers = max(1, sum(client.nthreads().values()), core_count() if gpu else 0)
        self.budget_bytes = _room(client)
        if gpu:
            self.budget_bytes = min(self.budget_bytes, min(client.run(free_gpu_bytes).values()) // 4)

    def reduce(
        self, function: Callable[..., Any], merge: Callable[[Any, Any], Any], held: Held, *shared: Any
    ) -> Any:
        futures = self._submit(self._safe(function), [(value,) for value in held], shared)
        while len(futures) > 1:
            groups = [futures[start : start + _FAN_IN] for start in range(0, len(futures), _FAN_IN)]
            futures = [self._client.submit(_merge_all, merge, *group, pure=False) for group in groups]
        return self._gather(futures)[0]

    def rescues(self) -> int:
        return sum(self._client.run(take_rescues).values()) if self.gpu else 0

    def _run(
        self, function: Callable[..., Any], arguments: Arguments, shared: tuple[Any, ...], *, keep: bool
    ) -> list[Any]:
        if keep and self._in_memory:
            return self._submit(function, arguments, shared)
        return self._gather(self._submit(function, arguments, shared, self._scratch if keep else None))

    def _submit(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        shared: tuple[Any, ...],
        scratch: str | None = None,
    ) -> list[Any]:
        placed = self._client.submit(loaded, spill(shared, self._scratch), pure=False)
        return [self._client.submit(call, function, scratch, placed, *own, pure=False) for own in arguments]

    def _gather(self, futures: list[Any]) -> list[Any]:
        try:
            for done, _ in enumerate(_as_completed(futures, loop=self._client.loop), 1):
                self.tell(done, len(futures))
            return list(self._client.gather(futures))
        except KilledWorker as error:
            raise WorkersLost(str(error)) from error
        except (CommClosedError, FutureCancelledError) as error:
            raise EngineFailed(engine="dask", reason=f"the scheduler is gone ({error})") from error


def _merge_all(merge: Callable[[Any, Any], Any], *parts: Any) -> Any:
    return reduce(merge, parts)


def _room(client: Any) -> int:
    """Bytes for a piece in the smallest worker."""
    rooms = []
    for worker in client.scheduler_info(n_workers=-1)["workers"].values():
        limit = worker["memory_limit"] or 2**62
        free = limit - worker["metrics"].get("memory", 0)
        rooms.append(int(max(free, limit // 8) * _WORKER_SHARE / max(1, worker["nthreads"])))
    return min(rooms, default=2**28)
