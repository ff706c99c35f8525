"""A Dask cluster with one worker per GPU, or several, in a separate process: the ETL continues if it fails.

python -m serin.etl.engines.cuda_cluster WORKERS FOLDER     runs until its standard input ends

The first line of the standard input has the certificates of the only client that is accepted: they are on no disk.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from serin.errors import ClusterNotUp
from serin.etl.engines.device import QUICK_COMPILER
from serin.machine import environment
from serin.machine.dask_cluster import LOST_WORKERS_COME_BACK

START_S = 90.0
_STOP_S = 15.0
_ADDRESS = "address"
_LOG = "log.txt"
_THREADS = 2  # per worker: one prepares what the GPU does next while the other waits for it


@contextmanager
def gpu_cluster(
    workers: int,
    folder: Path,
    start_s: float = START_S,
    *,
    certificates: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The scheduler's address. ClusterNotUp when there is none after `start_s`; nothing is left behind then.

    `certificates`: settings of Dask's `Security`, as text; the cluster accepts only clients that have them. None: it
    accepts every user of this machine, who may then run code on its workers."""
    folder.mkdir(parents=True, exist_ok=True)
    environment.prefer(*QUICK_COMPILER)
    path = os.pathsep.join(each for each in sys.path if each)  # workers find what this process finds
    with (folder / _LOG).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "serin.etl.engines.cuda_cluster", str(workers), str(folder)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment.child_environment(PYTHONPATH=path, PYTHONUNBUFFERED="1"),
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        with suppress(BrokenPipeError):  # it ended already, which is reported with its reason
            process.stdin.write(json.dumps(certificates).encode() + b"\n")
            process.stdin.flush()
        yield _address(process, folder, start_s)
    finally:
        _end(process)


def _address(process: subprocess.Popen[bytes], folder: Path, start_s: float) -> str:
    deadline = time.monotonic() + start_s
    while not (folder / _ADDRESS).exists():
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(0.1)
            raise ClusterNotUp(reason=f"its process ended with code {code}: {_last_words(folder)}")
        if time.monotonic() > deadline:
            raise ClusterNotUp(reason=f"it was not up after {start_s:g} s: {_last_words(folder)}")
    return (folder / _ADDRESS).read_text(encoding="utf-8")


def _last_words(folder: Path) -> str:
    lines = (folder / _LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][-300:] if said else "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Lets it end by itself; one that does not is killed with its workers."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(workers: int, folder: Path) -> None:
    import dask
    from dask_cuda import LocalCUDACluster
    from distributed.security import Security

    certificates: dict[str, str] | None = json.loads(sys.stdin.buffer.readline() or b"null")
    closed: Any = Security  # it has no types
    with (
        dask.config.set(LOST_WORKERS_COME_BACK | {"temporary-directory": str(folder)}),
        sharing(LocalCUDACluster)(
            n_workers=workers,
            threads_per_worker=_THREADS,
            rmm_async=True,  # takes what is used, no more
            rmm_allocator_external_lib_list=["cupy"],
            local_directory=str(folder),
            preload=["serin.etl.engines.subnormals"],
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.ERROR,
            security=None if certificates is None else closed(require_encryption=True, **certificates),
        ) as cluster,
    ):
        written = folder / f"{_ADDRESS}.new"
        written.write_text(cluster.scheduler_address, encoding="utf-8")
        written.rename(folder / _ADDRESS)
        sys.stdin.buffer.read()  # until the parent closes it or dies


def sharing(base: Any) -> Any:
    """dask-cuda's cluster with any number of workers, in turns on the GPUs. Its own names a worker by its GPU, so that
    each GPU can have only one."""

    class SharingCluster(base):  # type: ignore[misc]
        cuda_visible_devices: list[Any]

        def new_worker_spec(self) -> dict[str, Any]:
            devices = self.cuda_visible_devices
            number = next(number for number in count() if f"worker-{number}" not in self.worker_spec)
            self.cuda_visible_devices = [devices[number % len(devices)]]
            try:
                ((_, spec),) = super().new_worker_spec().items()
            finally:
                self.cuda_visible_devices = devices
            return {f"worker-{number}": spec}

    return SharingCluster


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
