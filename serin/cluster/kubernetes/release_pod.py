"""The programs of a release's pod: `python -m serin.cluster.kubernetes.release_pod prepare|serve RELEASE`.

`prepare` is the init container: it fetches the bundle from the store and writes the model repository. `serve` becomes
Triton; it needs neither the store nor its credentials.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from serin.cluster.kubernetes.release_objects import GRPC_PORT, HTTP_PORT, METRICS_PORT
from serin.errors import ReleaseNotReady, SerinError
from serin.machine import environment
from serin.machine.process import Process, ProcessState
from serin.serving.triton.installation import find_triton
from serin.serving.triton.process import triton_process
from serin.serving.triton.release_record import read_record
from serin.serving.triton.releases import Releases
from serin.store.artifacts import Release
from serin.store.store import Store
from serin.store.trust import Trust


class _OtherContainer:
    """The process host of an init container: another container of the pod starts the process."""

    def start(self, process: Process) -> None:
        pass

    def stop(self, name: str) -> None:
        pass

    def state(self, name: str) -> ProcessState:  # noqa: ARG002
        return "absent"

    def pid(self, name: str) -> int | None:  # noqa: ARG002
        return None


def prepare(release: Release, folder: Path) -> None:
    """Writes the repository and the record of the release to `folder`. Repeating it changes nothing."""
    ports = (HTTP_PORT, GRPC_PORT, METRICS_PORT)
    Releases(folder, host=_OtherContainer(), store=Store.open(), ports=ports, trust=Trust.open()).start(
        release
    )


def serve(release: Release, folder: Path, address: str) -> None:
    """Replaces this process by Triton, which listens on `address`."""
    record = read_record(folder / release.name)
    if record is None:
        raise ReleaseNotReady(
            release=release.name, reason=f"{folder} has no repository of it", log="the init container's log"
        )
    process = triton_process(
        find_triton(),
        release,
        folder / release.name / "repository",
        record.place,
        folder / "triton.log",
        record.served.devices,
        address=address,
    )
    os.chdir(process.folder)
    os.execve(process.command[0], process.command, process.environment)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m serin.cluster.kubernetes.release_pod", description=__doc__
    )
    parser.add_argument("step", choices=("prepare", "serve"))
    parser.add_argument("release", help="such as flights-v3")
    parser.add_argument("--address", default="0.0.0.0", help="the address that Triton listens on")  # noqa: S104
    given = parser.parse_args()
    folder = environment.home() / "releases"
    try:
        release = Release.parse(given.release)
        if given.step == "prepare":
            prepare(release, folder)
        else:
            serve(release, folder, given.address)
    except SerinError as error:
        sys.exit(f"{given.release}: {error}")


if __name__ == "__main__":
    main()
