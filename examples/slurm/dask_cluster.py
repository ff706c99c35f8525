"""A Dask cluster on Slurm nodes for the ETL of large tables: workers are Slurm jobs, as many as there is work for.

    python examples/slurm/dask_cluster.py /shared/dask --most 8 --cores 4 --memory-gb 16 --interface eth0

It writes FOLDER/environment, with the address and certificates that pipelines need, and works until it is stopped.
Needs `pip install 'serin[slurm]'`. FOLDER must be visible to all nodes and is closed to other users: anyone who has the
certificates may run code on the workers.
"""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from dask_jobqueue import SLURMCluster
from distributed.security import Security


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=4, help="jobs at most")
    parser.add_argument("--least", type=int, default=1, help="jobs that are kept without work")
    parser.add_argument("--cores", type=int, default=4, help="of one job; a worker process each")
    parser.add_argument("--memory-gb", type=float, default=16, help="of one job")
    parser.add_argument("--minutes", type=int, default=240, help="time limit of one job")
    parser.add_argument("--partition", help="Slurm's partition")
    parser.add_argument("--interface", help="the network interface of this machine that the nodes reach")
    parser.add_argument("--worker-interface", help="that of the nodes, where it has another name")
    given = parser.parse_args()
    given.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    given.folder.chmod(0o700)
    files, security = _certificates(given.folder)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with SLURMCluster(
        cores=given.cores,
        processes=given.cores,
        memory=f"{given.memory_gb}GB",
        walltime=f"{given.minutes // 60:02d}:{given.minutes % 60:02d}:00",
        queue=given.partition,
        interface=given.worker_interface or given.interface,
        log_directory=str(given.folder),
        local_directory=str(given.folder),
        job_name="serin-dask",
        worker_extra_args=["--lifetime", f"{max(1, given.minutes - 5)}m", "--lifetime-stagger", "2m"],
        protocol="tls",
        security=security,
        scheduler_options={"interface": given.interface, "dashboard": False},
    ) as cluster:
        cluster.adapt(minimum_jobs=given.least, maximum_jobs=given.most)
        lines = [
            f"SERIN_DASK={cluster.scheduler_address}",
            *(f"{name}={path}" for name, path in files.items()),
        ]
        _write(given.folder / "environment", "\n".join(lines) + "\n")
        print(f"ready: set -a; . {given.folder / 'environment'}; set +a", flush=True)
        stop.wait()
    (given.folder / "environment").unlink()


def _certificates(folder: Path) -> tuple[dict[str, Path], Security]:
    """New certificates for this cluster, as files that only their owner can read."""
    made = Security.temporary()
    ca, certificate, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    for file, text in (
        (ca, made.tls_ca_file),
        (certificate, made.tls_client_cert),
        (key, made.tls_client_key),
    ):
        _write(file, text)
    tls = "DASK_DISTRIBUTED__COMM__TLS"
    names = {f"{tls}__CA_FILE": ca, f"{tls}__CLIENT__CERT": certificate, f"{tls}__CLIENT__KEY": key}
    roles = {f"tls_{role}_{kind}": str(file) for role in ("client", "scheduler", "worker")
             for kind, file in (("cert", certificate), ("key", key))}  # fmt: skip
    return names, Security(tls_ca_file=str(ca), require_encryption=True, **roles)


def _write(file: Path, text: str) -> None:
    file.touch(mode=0o600)
    file.write_text(text)


if __name__ == "__main__":
    main()
