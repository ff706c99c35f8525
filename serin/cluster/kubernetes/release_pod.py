"""The programs of a release's pod: `python -m serin.cluster.kubernetes.release_pod prepare|serve|verify RELEASE`.

`prepare` is the init container: it fetches the bundle from the store and writes the model repository. `serve` becomes
Triton; it needs neither the store nor its credentials. `verify` is the startup probe beside it: it waits until the
model is loaded and warm, then checks the golden rows, so that a replica gets no traffic before it has answered them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from serin.cluster.kubernetes.release_objects import GRPC_PORT, HTTP_PORT, METRICS_PORT
from serin.errors import ReleaseNotReady, SerinError
from serin.formats.schema import read_schema
from serin.machine import environment
from serin.machine.process import Process, ProcessState
from serin.serving.triton.installation import find_triton
from serin.serving.triton.probe import RowTimes, answers
from serin.serving.triton.process import triton_process
from serin.serving.triton.release_record import Record, read_record
from serin.serving.triton.releases import Releases
from serin.serving.triton.verify import verify_release
from serin.store.artifacts import Release
from serin.store.published import bundle_at
from serin.store.store import Store
from serin.store.trust import Trust

REASON: Final = Path("/dev/termination-log")  # what Kubernetes shows as the reason of a container's end
LOG: Final = Path("/proc/1/fd/2")  # of the container: Triton is its first process
LOADS_S: Final = 590.0  # a little less than timeoutSeconds of the startup probe
_BUNDLE: Final = "bundle"
_LOOK_S: Final = 0.5


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
    """Writes the repository and the record of the release to `folder`, and a link to its bundle. Repeating it changes
    nothing."""
    ports, store = (HTTP_PORT, GRPC_PORT, METRICS_PORT), Store.open()
    Releases(folder, host=_OtherContainer(), store=store, ports=ports, trust=Trust.open()).start(release)
    link = folder / release.name / _BUNDLE
    link.unlink(missing_ok=True)
    link.symlink_to(store.bundle(release.model, release.label).path)


def serve(release: Release, folder: Path, address: str) -> None:
    """Replaces this process by Triton, which listens on `address`."""
    record = _prepared(release, folder)
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


def verify(release: Release, folder: Path, *, loads_s: float = LOADS_S) -> None:
    """Waits until this pod's Triton scores a row, then checks the golden rows.

    Raises ReleaseNotReady when it does not within `loads_s`, VerificationFailed with the first difference.
    """
    record = _prepared(release, folder)
    bundle = bundle_at((folder / release.name / _BUNDLE).resolve(), release)
    schema, endpoint = read_schema(Path(bundle.path)), record.place.endpoint
    patience_s, end = RowTimes().patience_s(release, record.served.request_s), time.monotonic() + loads_s
    while not answers(endpoint.http, release, schema, timeout_s=patience_s):
        if time.monotonic() > end:
            reason = f"it scored no row within {loads_s:.0f} s"
            raise ReleaseNotReady(release=release.name, reason=reason, log="the log of its container triton")
        time.sleep(_LOOK_S)
    verify_release(release, endpoint, bundle)


def _prepared(release: Release, folder: Path) -> Record:
    record = read_record(folder / release.name)
    if record is None:
        reason = f"{folder} has no repository of it"
        raise ReleaseNotReady(release=release.name, reason=reason, log="the init container's log")
    return record


def _fail(step: str, reason: str) -> None:
    """Ends this process. What a probe prints is an event of the pod alone, so it is also written where people look for
    it: to the log of the container, and as the reason of its end."""
    for path, mode in ((LOG, "a"), (REASON, "w")) if step == "verify" else ():
        with suppress(OSError), path.open(mode, encoding="utf-8") as file:
            file.write(f"{reason}\n")
    sys.exit(reason)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m serin.cluster.kubernetes.release_pod", description=__doc__
    )
    parser.add_argument("step", choices=("prepare", "serve", "verify"))
    parser.add_argument("release", help="such as flights-v3")
    parser.add_argument("--address", default="0.0.0.0", help="the address that Triton listens on")  # noqa: S104
    given = parser.parse_args()
    folder = environment.home() / "releases"
    try:
        release = Release.parse(given.release)
        if given.step == "prepare":
            prepare(release, folder)
        elif given.step == "serve":
            serve(release, folder, given.address)
        else:
            verify(release, folder)
    except SerinError as error:
        _fail(given.step, f"{given.release}: {error}")


if __name__ == "__main__":
    main()
