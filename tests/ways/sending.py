"""`make sending`: the seconds that sending by content adds to a run, at the machine that sends and on the worker.

Each figure is the best of several new processes, so that other work on the machine counts little. What a process
imports for it counts. The same content is then sent and opened once more.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.part import run_prepared
from tests.ways.place import COMMAND_S, ROOT, Done, run_here, sender_variables
from tests.ways.projects import write_project
from tests.ways.run import store_sending

_REPEATS = 5
_ISOLATED = "SERIN_WAYS_ISOLATED"
Runs = Callable[..., Done]


def send(path: str, *, elsewhere: bool) -> dict[str, Any]:
    """Packs and sends a spec, as `serin run` does when it has read the spec."""
    from serin.pipeline.pack import pack_spec
    from serin.spec.load import read_spec

    written = read_spec(path)
    began = time.monotonic()
    package = pack_spec(written, elsewhere=elsewhere)
    package.send()
    return {"spec": package.reference, "seconds": time.monotonic() - began}


def open_on_a_worker(source: str) -> dict[str, Any]:
    """Opens a spec, as a flow does. The worker has used its store before."""
    from serin.pipeline.open_spec import opened_spec
    from serin.store.store import Store

    Store.open().versions("none")
    began = time.monotonic()
    with opened_spec(source):
        return {"seconds": time.monotonic() - began}


def measure(folder: Path, sender: Runs, worker: Runs, *, elsewhere: bool) -> dict[str, float]:
    """`sender`, `worker`: run a command there."""
    found: dict[str, list[float]] = {}
    for number in range(_REPEATS):
        write_project("module", folder / str(number), f"sending-{number}")
        spec = str(folder / str(number) / "model" / "spec.yaml")
        for which in ("first", "second"):
            sent = _asked(sender, "elsewhere" if elsewhere else "here", spec)
            opened = _asked(worker, "open", sent["spec"])
            found.setdefault(f"{which}_sender", []).append(sent["seconds"])
            found.setdefault(f"{which}_worker", []).append(opened["seconds"])
        if not elsewhere:
            found.setdefault("path_worker", []).append(_asked(worker, "open", spec)["seconds"])
    return {name: round(min(values), 3) for name, values in found.items()}


def _asked(run: Runs, *words: str) -> dict[str, Any]:
    done = run(sys.executable, "-m", "tests.ways.sending", *words)
    assert done.code == 0, done.said
    found: dict[str, Any] = json.loads(done.said.strip().splitlines()[-1])
    return found


def _measure_here(folder: Path) -> dict[str, float]:
    def run(*command: str) -> Done:
        return run_here(command, ROOT, sender_variables(folder))

    return measure(folder / "projects", run, run, elsewhere=False)


def _measure_hosts(folder: Path) -> dict[str, float]:
    """The sender and the worker on hosts of their own, and an object store on a third."""
    from tests.cluster.hosts_cluster import three_hosts

    with pytest.MonkeyPatch.context() as patch, three_hosts(folder, patch) as cluster:

        def on(name: str) -> Runs:
            def run(*command: str) -> Done:
                env: Mapping[str, str] = cluster.environment(name)
                done = cluster.network[name].run(command, env=env, cwd=ROOT, within_s=COMMAND_S, check=False)
                return Done(done.returncode, done.stderr + done.stdout)

            return run

        return measure(folder / "projects", on("c"), on("a"), elsewhere=True)


def main(words: list[str]) -> int:
    match words:
        case ["open", source]:
            print(json.dumps(open_on_a_worker(source)))
        case [("here" | "elsewhere") as where, path]:
            print(json.dumps(send(path, elsewhere=where == "elsewhere")))
        case _ if _ISOLATED not in os.environ:
            return run_prepared("tests.ways.sending", _ISOLATED, "namespaces", "seaweedfs")
        case _:
            for name, measured in {"machine": _measure_here, "host": _measure_hosts}.items():
                with tempfile.TemporaryDirectory(prefix="ws-") as folder:
                    store_sending(name, measured(Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
